"""The job file: what is accepted, what is refused, and how it is said."""

import contextlib
import dataclasses

import pytest

from surefoot.controller.spec import tables
from surefoot.controller.spec.problems import Problem, SpecError
from surefoot.controller.spec.reading import load_spec, parse_spec
from surefoot.controller.spec.tables import CAUSES, TABLES, CheckpointTable, DetectTable, JobSpec, JobTable

MINIMAL = """
[job]
name = "gpt"
steps = 60
root = "file:///data/gpt"
[program]
train = "examples.gpt:train"
data = "examples.gpt:data"
"""

FULL = """
[job]
name = "gpt"
seed = 7
steps = 60
root = "s3://bucket/prefix"

[program]
train = "examples.gpt:train"
data = "examples.gpt:data"
preload = ["examples.gpt"]
[program.params]
width = 128
shards = ["a", "b"]
optimizer = { lr = 1e-3 }

[layout]
nodes = 2
nodes_min = 1
standbys = 1
ranks_per_node = 2
mesh = { dp = -1, tp = 1, pp = 1 }
canonical = false
virtual_shards = 12

[checkpoint]
memory_every_steps = 1
every_steps = 20
keep = 3
keep_every_steps = 1000
memory_budget = "2GB"

[detect]
lease_ttl_s = 10
hang_floor_s = 5
hang_factor = 5
warmup_steps = 3
observe = ["straggler"]

[policy]
restarts = { workload = 3, infrastructure = 20, preemption = 100 }
wait_for_node_s = 60
grace_s = 30
spike_factor = 5
"""


def with_key(table: str, line: str) -> str:
    """MINIMAL with one more line in a table."""
    if f"[{table}]" in MINIMAL:
        return MINIMAL.replace(f"[{table}]", f"[{table}]\n{line}")
    return f"{MINIMAL}[{table}]\n{line}\n"


def without_key(key: str) -> str:
    return "\n".join(line for line in MINIMAL.splitlines() if not line.startswith(key))


def problems(text: str) -> dict[str, Problem]:
    with pytest.raises(SpecError) as caught:
        parse_spec(text)
    return {p.place: p for p in caught.value.problems}


class TestAccepted:
    def test_the_designs_example_means_what_it_says(self):
        spec = parse_spec(FULL)
        assert spec.job == JobTable(name="gpt", seed=7, steps=60, root="s3://bucket/prefix")
        assert spec.program.params == {"width": 128, "shards": ["a", "b"], "optimizer": {"lr": 1e-3}}
        assert spec.world_size == 4
        assert spec.mesh_sizes == {"pp": 1, "dp": 4, "tp": 1}
        assert list(spec.mesh_sizes) == ["pp", "dp", "tp"]
        assert spec.checkpoint.memory_budget == 2_000_000_000
        assert spec.detect.observe == ("straggler",)

    def test_everything_optional_has_a_default(self):
        spec = parse_spec(MINIMAL)
        assert (spec.layout.nodes, spec.layout.nodes_min, spec.layout.standbys) == (1, 1, 0)
        assert spec.mesh_sizes == {"pp": 1, "dp": 1, "tp": 1}
        assert spec.checkpoint == CheckpointTable()
        assert spec.detect == DetectTable()
        assert spec.policy.restarts == CAUSES

    def test_a_budget_given_for_one_cause_leaves_the_others(self):
        spec = parse_spec(with_key("policy", "restarts = { workload = 0 }"))
        assert spec.policy.restarts == {**CAUSES, "workload": 0}

    def test_dp_takes_what_the_mesh_leaves(self):
        spec = parse_spec(with_key("layout", "nodes = 4\nranks_per_node = 2\nmesh = { tp = 2, pp = 2 }"))
        assert spec.mesh_sizes == {"pp": 2, "dp": 2, "tp": 2}
        assert spec.mesh_at(4) == {"pp": 2, "dp": 1, "tp": 2}
        with pytest.raises(ValueError, match="do not divide"):
            spec.mesh_at(6)

    @pytest.mark.parametrize(
        ("written", "size"),
        [('"2GB"', 2 * 10**9), ('"512MiB"', 2**29), ('"1.5 kb"', 1500), ('"7B"', 7), ("4096", 4096)],
    )
    def test_sizes(self, written: str, size: int):
        spec = parse_spec(with_key("checkpoint", f"memory_budget = {written}"))
        assert spec.checkpoint.memory_budget == size

    @pytest.mark.parametrize("root", ["file:///a", "/a/b", "s3://bucket", "s3://bucket/a/b"])
    def test_roots(self, root: str):
        assert parse_spec(MINIMAL.replace("file:///data/gpt", root)).job.root == root

    def test_load_reads_a_file(self, tmp_path):
        path = tmp_path / "job.toml"
        path.write_text(FULL)
        assert load_spec(path) == parse_spec(FULL)


class TestHash:
    def test_the_form_of_the_file_makes_no_difference(self):
        loose = MINIMAL.replace(
            "[program]", "# a comment\n[layout]\nmesh = {tp = 1}\n[policy]\ngrace_s = 30.0\n[program]"
        )
        assert parse_spec(loose).hash == parse_spec(MINIMAL).hash

    def test_every_value_makes_one(self):
        spec = parse_spec(MINIMAL)
        changed = [
            dataclasses.replace(spec, job=dataclasses.replace(spec.job, seed=1)),
            dataclasses.replace(spec, program=dataclasses.replace(spec.program, params={"a": 1})),
            dataclasses.replace(
                spec, layout=dataclasses.replace(spec.layout, mesh={"pp": 1, "dp": 1, "tp": 1})
            ),
        ]
        assert len({spec.hash, *(c.hash for c in changed)}) == 4
        assert len(spec.hash) == 64

    def test_it_is_the_same_in_every_process(self):
        # Frozen: a change of the canonical form would refuse every running job.
        assert parse_spec(MINIMAL).hash == "bff379911a273583b3a3b564a5f443f711ef7d5b5af58caba08e3888fde23a89"


class TestRefused:
    @pytest.mark.parametrize(
        ("table", "line", "place", "nearest"),
        [
            ("layout", "node = 2", "layout.node", "nodes"),
            ("layout", "mesh = { ddp = 2 }", "layout.mesh.ddp", "dp"),
            ("layuot", "nodes = 2", "layuot", "layout"),
            ("checkpoint", "keeep = 3", "checkpoint.keeep", "keep"),
            ("detect", 'observe = ["hangs"]', "detect.observe", "hang"),
            ("policy", "restarts = { workloads = 3 }", "policy.restarts.workloads", "workload"),
            ("detect", "xyzzy = 1", "detect.xyzzy", None),
        ],
    )
    def test_unknown_names_come_with_the_nearest(
        self, table: str, line: str, place: str, nearest: str | None
    ):
        found = problems(with_key(table, line))
        assert set(found) == {place}
        assert found[place].nearest == nearest

    @pytest.mark.parametrize(
        ("table", "line", "place"),
        [
            ("layout", "nodes = 0", "layout.nodes"),
            ("layout", "nodes = 2\nnodes_min = 3", "layout.nodes_min"),
            ("layout", "nodes = true", "layout.nodes"),
            ("layout", "nodes = 2.0", "layout.nodes"),
            ("layout", "ranks_per_node = 3\nmesh = { tp = 2 }", "layout.mesh"),
            ("layout", "nodes = 2\nmesh = { dp = 3 }", "layout.mesh"),
            ("layout", "mesh = { dp = -1, tp = -1 }", "layout.mesh"),
            ("layout", "mesh = { dp = 0 }", "layout.mesh.dp"),
            ("layout", "mesh = 4", "layout.mesh"),
            ("layout", "nodes = 3\nnodes_min = 1\nmesh = { tp = 3 }", "layout.nodes_min"),
            ("layout", "canonical = true", "layout.canonical"),
            ("layout", "mesh = { cp = 2 }", "layout.mesh.cp"),
            ("layout", "mesh = { ep = 1 }", "layout.mesh.ep"),
            ("checkpoint", "keep = 1", "checkpoint.keep"),
            ("checkpoint", 'memory_budget = "2 gigs"', "checkpoint.memory_budget"),
            ("checkpoint", "memory_budget = 0", "checkpoint.memory_budget"),
            ("checkpoint", "every_steps = 20\nkeep_every_steps = 30", "checkpoint.keep_every_steps"),
            ("checkpoint", "memory_every_steps = 5", "checkpoint.memory_every_steps"),
            ("checkpoint", "every_s = 0", "checkpoint.every_s"),
            ("checkpoint", "every_s = 600\nkeep_every_steps = 40", "checkpoint.keep_every_steps"),
            ("checkpoint", 'every = "often"', "checkpoint.every"),
            ("checkpoint", "every = 20", "checkpoint.every"),
            ("detect", "lease_ttl_s = 9", "detect.lease_ttl_s"),
            ("detect", "hang_factor = 1", "detect.hang_factor"),
            ("detect", "hang_floor_s = inf", "detect.hang_floor_s"),
            ("detect", 'observe = ["hang", "hang"]', "detect.observe"),
            ("detect", "observe = 3", "detect.observe"),
            ("policy", "grace_s = -1", "policy.grace_s"),
            ("policy", "restarts = { workload = -1 }", "policy.restarts.workload"),
            ("job", "seed = -1", "job.seed"),
            ("program", 'preload = ["a-b"]', "program.preload"),
            ("program.params", "start = 2026-01-01", "program.params.start"),
            ("program.params", "a = { b = [nan] }", "program.params.a"),
        ],
    )
    def test_values(self, table: str, line: str, place: str):
        assert set(problems(with_key(table, line))) == {place}

    @pytest.mark.parametrize("key", ["name", "steps", "root", "train", "data"])
    def test_missing(self, key: str):
        ((place, problem),) = problems(without_key(key)).items()
        assert place.endswith("." + key)
        assert "missing" in problem.reason
        assert problem.line is not None, "points at the table"

    @pytest.mark.parametrize("name", ["", ".hidden", "a/b", "a b", "x" * 64, "ü", "a\\n"])
    def test_names_are_safe_for_keys_and_paths(self, name: str):
        assert set(problems(MINIMAL.replace('"gpt"', f'"{name}"'))) == {"job.name"}

    @pytest.mark.parametrize("name", ["train", "a:", ":b", "a.b:c d", "a:b:c", "1a:b"])
    def test_functions_are_named_module_colon_function(self, name: str):
        assert set(problems(MINIMAL.replace("examples.gpt:train", name))) == {"program.train"}

    @pytest.mark.parametrize(
        ("root", "nearest"),
        [("s3s://b/x", "s3"), ("gs://b", None), ("data/gpt", None), ("file://data", None), ("s3://", None)],
    )
    def test_roots(self, root: str, nearest: str | None):
        assert problems(MINIMAL.replace("file:///data/gpt", root))["job.root"].nearest == nearest

    def test_ways_to_give_the_distance_exclude_each_other(self):
        found = problems(with_key("checkpoint", "every_s = 600\nevery_steps = 20"))
        assert set(found) == {"checkpoint.every_s", "checkpoint.every_steps"}

    def test_a_command_comes_later_and_says_what_to_use(self):
        text = MINIMAL.replace(
            'train = "examples.gpt:train"\ndata = "examples.gpt:data"', 'command = ["python", "train.py"]'
        )
        assert "comes later; for now use train and data" in problems(text)["program.command"].reason
        both = with_key("program", 'command = ["python", "train.py"]')
        assert "excludes train and data" in problems(both)["program.command"].reason

    def test_a_table_that_is_none(self):
        found = problems("job = 3\n[program]\ntrain = 'a:b'\ndata = 'a:b'")
        assert set(found) == {"job"}, "no further complaint about keys of what is not there"

    def test_a_key_outside_of_any_table(self):
        assert "outside" in problems("steps = 3" + MINIMAL)["steps"].reason


LITERALS = (
    *(
        "true",
        "-1",
        "0",
        "1",
        "-0.0",
        "1.5",
        "nan",
        "inf",
        "9223372036854775807",
        '""',
        '"x"',
        '"s3://"',
        "[]",
        "[1]",
    ),
    *('["x", 1]', "{}", "{ a = 1 }", "{ dp = true }", "{ dp = [] }", "1979-05-27", "07:32:00", "[[1], []]"),
)


@pytest.mark.parametrize("table", TABLES)
def test_no_value_of_any_key_is_worse_than_a_spec_error(table: str):
    (kind,) = (f.type for f in dataclasses.fields(JobSpec) if f.name == table)
    keys = [f.name for f in dataclasses.fields(getattr(tables, kind))]
    lines = [line for line in FULL.splitlines() if line != "[program.params]"]
    for key in [*keys, "command", "every", "every_s", ""]:
        for literal in LITERALS:
            at = lines.index(f"[{table}]") + 1
            text = "\n".join(
                [line for line in lines[:at]]
                + [f"{key or 'x'} = {literal}"]
                + [line for line in lines[at:] if not line.startswith(f"{key} =")]
            )
            with contextlib.suppress(SpecError):
                assert len(parse_spec(text).hash) == 64


class TestMessages:
    def test_all_problems_at_once_each_with_its_line(self):
        text = (
            MINIMAL.replace("steps = 60", 'steps = "many"')
            + "[layout]\nnodse = 2\n[detect]\nlease_ttl_s = 5\n"
        )
        with pytest.raises(SpecError) as caught:
            parse_spec(text, source="here.toml")
        lines = str(caught.value).splitlines()
        assert lines[0] == "here.toml: 3 problems"
        assert [line.split(": ")[:2] for line in lines[1:]] == [
            ["  line 4", "job.steps"],
            ["  line 10", "layout.nodse"],
            ["  line 12", "detect.lease_ttl_s"],
        ]
        assert lines[2].endswith("(did you mean 'nodes'?)")

    def test_what_is_no_toml_points_at_the_line(self):
        assert problems("[job]\nname = \n")["TOML"].line == 2

    def test_a_file_that_is_not_there(self, tmp_path):
        with pytest.raises(SpecError, match=r"nowhere\.toml: 1 problem\n.*No such file"):
            load_spec(tmp_path / "nowhere.toml")

    def test_a_file_that_is_not_text(self, tmp_path):
        (tmp_path / "job.toml").write_bytes(b"\xff\xfe")
        with pytest.raises(SpecError, match="UTF-8"):
            load_spec(tmp_path / "job.toml")
