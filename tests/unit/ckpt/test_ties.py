"""Under which of its names a tied tensor is stored: the same on all ranks, and what Hugging Face keeps. (CKP-17)"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import ckpt_virtual as virtual
import msgspec
import pytest
import torch
from torch import nn

from surefoot import ckpt
from surefoot.ckpt.errors import CkptError
from surefoot.ckpt.manifest import Manifest, TensorMeta, decode, encode
from surefoot.ckpt.planning.ties import precedence
from surefoot.ckpt.state import collect
from surefoot.ckpt.store import MemoryObjectStore, open_store
from surefoot.ckpt.tools.boxreader import BoxReader
from surefoot.ckpt.tools.comparing import compare
from surefoot.ckpt.tools.exporting import plan_export
from surefoot.ckpt.tools.inspect import find


@pytest.mark.parametrize(
    ("kept", "others"),
    [
        ("model.embed_tokens.weight", ["lm_head.weight"]),
        ("transformer.wte.weight", ["lm_head.weight"]),
        ("tok_embeddings.weight", ["output.weight"]),
        ("gpt_neox.embed_in.weight", ["embed_out.weight"]),
        ("shared.weight", ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"]),
        ("model.shared.weight", ["model.decoder.embed_tokens.weight", "lm_head.weight"]),
        ("bert.embeddings.word_embeddings.weight", ["cls.predictions.decoder.weight"]),
        ("cls.predictions.bias", ["cls.predictions.decoder.bias"]),
        ("model.decoder.embed_tokens.weight", ["proj_out.weight"]),
        ("electra.embeddings.word_embeddings.weight", ["generator_lm_head.weight"]),
        ("z", ["a@rank3", "embed@rank0"]),
    ],
)
def test_the_name_that_is_kept(kept: str, others: list[str]) -> None:
    """Of models whose tied names transformers lists in `_tied_weights_keys`, the one that it does not list."""
    for prefix in ("", "model.", "state.net."):
        names = [prefix + n for n in (*others, kept)]
        assert min(names, key=precedence) == prefix + kept


def test_export_writes_that_name_whichever_is_stored() -> None:
    """A checkpoint from before this rule, too."""
    names = ("model.lm_head.weight", "model.model.embed_tokens.weight")
    for stored, other in (names, names[::-1]):
        manifest = Manifest(
            generation=1,
            step=1,
            attempt="a",
            world_size=1,
            tensors={stored: TensorMeta(dtype="float32", shape=(2,))},
            aliases={other: stored},
        )
        plan = plan_export(manifest)
        assert [(t.name, t.stored) for t in plan.files[0].tensors] == [("model.embed_tokens.weight", stored)]
        assert plan.ties == {"lm_head.weight": "model.embed_tokens.weight"}


class Holder:
    """An object that refers to tensors."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = list(tensors)

    def state_dict(self) -> dict[str, Any]:
        return {"tensors": self.tensors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensors = state["tensors"]


def everything_tied(rank: int) -> dict[str, Any]:
    """All that one tensor can be to a state, twice: a parameter, an entry, a part of a value, of all ranks and of one."""
    model = nn.Linear(3, 2, bias=False)
    own = torch.ones(5)
    with torch.no_grad():
        model.weight.fill_(1)
    optim = torch.optim.SGD([model.weight], momentum=0.9)
    optim.state[model.weight]["momentum_buffer"] = own
    return {
        "a": Holder(own, model.weight.data),
        "b": Holder(own),
        "entry": model.weight.data,
        "its": ckpt.PerRank(model.weight),
        "list": [1, model.weight.data],
        "model": model,
        "optim": optim,
        "mine": ckpt.PerRank(Holder(own, torch.full((1,), float(rank)))),
    }


def test_names_do_not_depend_on_the_order_of_the_state() -> None:
    found = collect(everything_tied(0))
    assert sorted(found.leaves) == ["a.tensors.0", "entry", "mine@rank0.tensors.1"]
    assert found.aliases == {"model.weight": "entry", "list.1": "entry", "its@rank0": "entry"}
    for order in itertools.islice(itertools.permutations(everything_tied(0)), 0, None, 97):
        state = everything_tied(0)
        again = collect({name: state[name] for name in order})
        assert again.leaves.keys() == found.leaves.keys()
        assert (again.aliases, again.values) == (found.aliases, found.values)


def test_ranks_that_fill_their_mappings_in_another_order_store_it_once() -> None:
    """And it is compared: where it differs the save is refused."""
    for odd in (False, True):
        ranks = [everything_tied(r) for r in range(3)]
        ranks[1] = dict(reversed(ranks[1].items()))
        ranks[2] = {
            name: ranks[2][name] for name in ("its", "mine", "optim", "list", "b", "a", "model", "entry")
        }
        store = MemoryObjectStore()
        if odd:
            ranks[1]["entry"][1, 2] += 1
            with pytest.raises(
                CkptError, match=r"replicas differ: entry\[0:2,0:3\] .* rank 1 against the majority"
            ):
                virtual.save(ranks, store)
            continue
        manifest = virtual.save(ranks, store)
        assert manifest.nbytes == 6 * 4 + 5 * 4 + 3 * 4
        fresh = [everything_tied(r) for r in range(3)]
        for state in fresh:
            state["entry"].zero_()
            state["a"].tensors[0].zero_()
        virtual.load([dict(reversed(state.items())) for state in fresh], store)
        for state in fresh:
            assert state["model"].weight.eq(1).all()
            assert state["optim"].state[state["model"].weight]["momentum_buffer"].eq(1).all()


def test_names_on_different_ranks_are_no_tie() -> None:
    """Pipeline stages: the embedding on the first, the head on the last, each with memory of its own."""
    embedding, head = torch.arange(4.0), torch.arange(4.0) + 1
    store = MemoryObjectStore()
    manifest = virtual.save([{"embed": embedding}, {"head": head}], store)
    assert (sorted(manifest.tensors), manifest.aliases, manifest.nbytes) == (["embed", "head"], {}, 32)
    first, last = {"embed": torch.zeros(4)}, {"head": torch.zeros(4)}
    virtual.load([first, last], store)
    assert first["embed"].equal(embedding)
    assert last["head"].equal(head)


class Net(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.emb = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        if tied:
            self.head.weight = self.emb.weight


def with_optimizer(*, tied: bool, stepped: bool) -> dict[str, Any]:
    model = Net(tied=tied)
    optim = torch.optim.AdamW(model.parameters())
    if stepped:
        model.head(model.emb(torch.arange(6))).square().mean().backward()
        optim.step()
    return {"model": model, "optim": optim}


def rename_stored(root: Path) -> None:
    """As earlier versions wrote it, which took the name that they met first."""
    (file,) = root.glob("gen-*/step-*/manifest.json")
    text = msgspec.json.encode(decode(Manifest, file.read_bytes(), key="manifest")).decode()
    assert "model.emb.weight" in text
    other = (
        text.replace("model.emb.weight", "!")
        .replace("model.head.weight", "model.emb.weight")
        .replace("!", "model.head.weight")
    )
    file.unlink()
    file.write_bytes(encode(msgspec.json.decode(other, type=Manifest)))


@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_that_has_it_under_the_other_name_loads(tmp_path: Path, *, tied: bool) -> None:
    saved = with_optimizer(tied=True, stepped=True)
    ckpt.save(tmp_path, 1, saved)
    rename_stored(tmp_path)
    fresh = with_optimizer(tied=tied, stepped=False)
    loaded = ckpt.load(tmp_path, fresh)
    assert loaded is not None
    weight = saved["model"].emb.weight
    for parameter in fresh["model"].parameters():
        assert parameter.equal(weight)
        for key, value in saved["optim"].state[weight].items():
            assert fresh["optim"].state[parameter][key].equal(value)
    assert (fresh["model"].head.weight is fresh["model"].emb.weight) is tied


def test_a_diff_does_not_mind_which_name_is_stored(tmp_path: Path) -> None:
    """But it does where one has them tied and the other not."""
    state = {"model": with_optimizer(tied=True, stepped=False)["model"]}
    for name in ("one", "other"):
        ckpt.save(tmp_path / name, 1, state)
    rename_stored(tmp_path / "other")
    state["model"].head.weight = nn.Parameter(state["model"].emb.weight.detach().clone())
    ckpt.save(tmp_path / "untied", 1, state)
    one, other, untied = (reader(tmp_path / name) for name in ("one", "other", "untied"))
    assert compare(one, other).same
    assert compare(one, untied).ties_changed == ("model.emb.weight", "model.head.weight")


def reader(root: Path) -> BoxReader:
    store = open_store(root)
    return BoxReader(store, find(store, 1)[0])
