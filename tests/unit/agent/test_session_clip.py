import pytest
import torch

from surefoot.agent.clip import clip_grad_norm_


def _parameters(*grads: list[float] | None) -> list[torch.nn.Parameter]:
    parameters = []
    for grad in grads:
        parameter = torch.nn.Parameter(torch.zeros(2))
        parameter.grad = torch.tensor(grad) if grad is not None else None
        parameters.append(parameter)
    return parameters


def test_scales_down_to_the_norm() -> None:
    parameters = _parameters([3.0, 0.0], None, [0.0, 4.0])
    norm = clip_grad_norm_(parameters, 1.0)
    assert norm.item() == 5.0
    grads = [p.grad for p in parameters if p.grad is not None]
    assert torch.linalg.vector_norm(torch.cat(grads)).item() == pytest.approx(1.0, abs=1e-5)


def test_leaves_small_gradients_as_they_are() -> None:
    parameters = _parameters([0.3, 0.4])
    assert clip_grad_norm_(parameters, 1.0).item() == pytest.approx(0.5)
    assert parameters[0].grad is not None
    assert parameters[0].grad.tolist() == torch.tensor([0.3, 0.4]).tolist()


def test_as_torch_does() -> None:
    torch.manual_seed(3)
    ours = [torch.nn.Parameter(torch.zeros(50)) for _ in range(4)]
    theirs = [torch.nn.Parameter(torch.zeros(50)) for _ in range(4)]
    for a, b in zip(ours, theirs, strict=True):
        a.grad = torch.randn(50)
        b.grad = a.grad.clone()
    norm = clip_grad_norm_(ours, 2.0)
    assert norm.item() == pytest.approx(torch.nn.utils.clip_grad_norm_(theirs, 2.0).item(), rel=1e-6)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_nothing_to_clip() -> None:
    assert clip_grad_norm_(_parameters(None), 1.0).item() == 0.0


def test_nan_goes_through() -> None:
    parameters = _parameters([float("nan"), 1.0])
    assert torch.isnan(clip_grad_norm_(parameters, 1.0))
