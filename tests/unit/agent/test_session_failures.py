import pytest

from surefoot.agent import failures


class DistError(RuntimeError):
    """As torch.distributed's base is called."""


class DistNetworkError(DistError):
    pass


def _of(module: str) -> type[Exception]:
    return type("SomeError", (Exception,), {"__module__": module})


@pytest.mark.parametrize(
    ("error", "area", "begun", "kind"),
    [
        (DistNetworkError("client socket timed out"), None, True, "collective"),
        (
            RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer"),
            None,
            True,
            "collective",
        ),
        (RuntimeError("NCCL error: remote process exited"), None, False, "collective"),
        (RuntimeError("gloo broke while staging"), "checkpoint", True, "collective"),
        (ValueError("gloo is a word that users may use"), None, True, "workload"),
        (RuntimeError("shape mismatch"), None, True, "workload"),
        (RuntimeError("shape mismatch"), None, False, "startup"),
        (ValueError("from inside the loader"), "data", True, "data"),
        (_of("surefoot.loader.errors")("no such column"), None, False, "data"),
        (_of("surefoot.ckpt.errors")("checksum"), None, True, "checkpoint"),
        (failures.CommitGivenUpError("no"), None, True, "checkpoint"),
        (failures.BatchCountError("two"), None, True, "workload"),
        (SystemExit(0), None, True, "workload"),
    ],
)
def test_kind_of(error: BaseException, area: failures.Area | None, begun: bool, kind: str) -> None:
    assert failures.kind_of(error, area=area, first_step_begun=begun) == kind


def test_a_report_is_bounded_and_keeps_the_end() -> None:
    try:
        raise ValueError("x" * 50_000 + "the end")
    except ValueError as e:
        report = failures.report(e, area=None, first_step_begun=True)
    assert (report.kind, report.type) == ("workload", "ValueError")
    assert len(report.message) == failures.MESSAGE_CHARS_MAX
    assert len(report.traceback) == failures.TRACEBACK_CHARS_MAX
    assert report.message.endswith("the end")
    assert "the end" in report.traceback


def test_an_error_without_words_still_says_what_it_is() -> None:
    assert failures.report(KeyError(), area=None, first_step_begun=True).message == "KeyError()"


_LOADER = {"__module__": "surefoot.loader.errors"}


class _OfTheLoader(Exception):
    __module__ = "surefoot.loader.errors"


@pytest.mark.parametrize(
    ("error", "permanent"),
    [
        (failures.EntryPointError("no such function"), True),
        (failures.BatchCountError("two"), True),
        (type("BadDataError", (_OfTheLoader,), dict(_LOADER))("no such column"), True),
        (type("SourceUnreachableError", (_OfTheLoader,), dict(_LOADER))("no answer"), False),
        (type("BadDataError", (Exception,), {})("a user's own class of that name"), False),
        (RuntimeError("shape mismatch"), False),
        (failures.CommitGivenUpError("no"), False),
    ],
)
def test_what_must_fail_again_says_so(error: BaseException, permanent: bool) -> None:
    assert failures.report(error, area=None, first_step_begun=True).permanent == permanent
