from pathlib import Path

import pytest

from surefoot.agent import Run, session
from surefoot.agent.failures import StartupError
from surefoot.agent.session import RankEnv

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


def test_run_is_exported() -> None:
    assert Run is session.Run
