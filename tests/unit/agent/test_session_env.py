from pathlib import Path

import pytest

from surefoot.agent import Run, session
from surefoot.agent.failures import LayoutUnsupportedError, StartupError
from surefoot.agent.session import RankEnv, require_layout

ENVIRONMENT = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "SUREFOOT_GENERATION": "2",
    "SUREFOOT_AGENT_SOCKET": "/run/agent.sock",
    "SUREFOOT_TOKEN_FILE": "/run/token",
    "SUREFOOT_JOB": "/run/job.toml",
}


def test_the_environment_is_read_once_and_typed() -> None:
    env = RankEnv.read(ENVIRONMENT)
    assert (env.rank, env.local_rank, env.world_size, env.generation) == (3, 1, 4, 2)
    assert env.socket == Path("/run/agent.sock")
    assert env.history is None
    assert RankEnv.read(ENVIRONMENT | {"SUREFOOT_HISTORY": "/h"}).history == Path("/h")


@pytest.mark.parametrize("missing", sorted(ENVIRONMENT))
def test_a_missing_variable_is_named(missing: str) -> None:
    rest = {name: value for name, value in ENVIRONMENT.items() if name != missing}
    with pytest.raises(StartupError, match=missing):
        RankEnv.read(rest)


def test_only_data_parallel_meshes_for_now() -> None:
    require_layout({"pp": 1, "dp": 4, "tp": 1})
    with pytest.raises(LayoutUnsupportedError, match="tp = 2 comes later"):
        require_layout({"pp": 1, "dp": 2, "tp": 2})
    with pytest.raises(LayoutUnsupportedError, match="no axis dp"):
        require_layout({"pp": 1})


def test_run_is_exported() -> None:
    assert Run is session.Run
