"""Parts of the command line that need no run."""

from __future__ import annotations

from pathlib import Path

import pytest

from laminar.actors.system.processes import assign_gpus
from laminar.cli import commands, node
from laminar.cli.node import choose_roles, parse_roles
from laminar.config import ConfigError, dump_config, load_config
from laminar.launch.preflight import planned_steps
from laminar.launch.train import move_aside

GOOD = ["model.name=m", "data.dataset=gcd", "data.train_batch_size=4"]


def test_an_old_run_is_moved_to_the_first_free_name(tmp_path: Path) -> None:
    for expected in ("run.1", "run.2"):
        (tmp_path / "run").mkdir()
        assert move_aside(tmp_path / "run").name == expected
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.1", "run.2"]


def test_roles_of_a_node() -> None:
    assert parse_roles("relay,rollout:3") == [("relay", 1), ("rollout", 3)]
    for bad in ("relay,rolout:2", "rollout:x", ""):
        with pytest.raises(ConfigError, match="--roles"):
            parse_roles(bad)


@pytest.mark.parametrize(("name", "roles", "words"), [
    ("node-1", "relay,ranks", "node-1 cannot have ranks: trainer-node-1, ... have ranks"),
    ("trainer-node-1", "ranks,relay", "trainer-node-1 cannot have relay"),
    ("trainer-node-0", "", "'trainer-node-0' is not a node name"),
    ("node-1", "store,relay", "the store of a run is on node-0, not on node-1"),
])  # fmt: skip
def test_roles_that_a_node_cannot_have(name: str, roles: str, words: str) -> None:
    config = load_config([], [*GOOD, "trainer.nodes=2"])
    with pytest.raises(ConfigError, match=words):
        choose_roles(name, parse_roles(roles) if roles else None, config)


def test_a_node_without_roles_has_those_of_its_name() -> None:
    config = load_config([], [*GOOD, "trainer.nodes=3", "run.nodes=2"])
    assert config.node_names == ["node-0", "node-1", "trainer-node-1", "trainer-node-2"]
    assert dict(choose_roles("node-1", None, config)).keys() == {"relay", "rollout"}
    assert choose_roles("trainer-node-9", None, config) == [("ranks", 1)]  # a spare
    with pytest.raises(ConfigError, match=r"trainer.nodes = 1, so all ranks are on node-0"):
        choose_roles("trainer-node-1", None, load_config([], GOOD))


@pytest.mark.parametrize(("host", "why"), [
    ("10.1.2.3", "of this machine"),
    ("0.0.0.0", "would listen on all interfaces"),
    ("machine-7", "is not a known address"),
])  # fmt: skip
def test_a_node_listens_on_an_address_of_its_own_machine(
    host: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "config.toml").write_text(dump_config(load_config([], GOOD)))
    monkeypatch.setattr("sys.argv", ["laminar-node", str(tmp_path), "--host", host])
    with pytest.raises(SystemExit) as ended:
        node.main()
    said = capfd.readouterr().err.strip().splitlines()
    assert (ended.value.code, len(said)) == (2, 1)
    assert f"--host = '{host}'" in said[0] and why in said[0]


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        ([], 3),
        (["data.drop_last=true"], 2),
        (["trainer.total_epochs=2"], 5),
        (["trainer.total_training_steps=9"], 9),
    ],
)
def test_planned_steps(overrides: list[str], steps: int) -> None:
    assert planned_steps(load_config([], [*GOOD, *overrides]), num_train=10) == steps


def test_the_trainer_has_the_first_gpu_and_replicas_take_turns_on_the_others() -> None:
    names = [("trainer", "trainer-0"), *(("rollout", f"rollout-{i}") for i in range(3))]
    assert [assign_gpus(role, name, ["4", "5", "6"]) for role, name in names] == [
        ["4"],
        ["5"],
        ["6"],
        ["5"],
    ]
    assert [assign_gpus(role, name, ["0"]) for role, name in names] == [["0"]] * 4
    assert assign_gpus("store", "store-0", ["0"]) == []
    assert assign_gpus("trainer", "trainer-0", []) == assign_gpus("rollout", "rollout-0", []) == []


def test_a_replica_of_several_gpus_has_neighbours_of_its_own() -> None:
    eight = [str(gpu) for gpu in range(8)]
    names = ["rollout-0", "rollout-1", "rollout-2", "rollout-3"]
    given = [assign_gpus("rollout", name, eight, 2) for name in names]
    assert given == [["1", "2"], ["3", "4"], ["5", "6"], ["1", "2"]]
    assert assign_gpus("rollout", "rollout-0", ["0", "1"], 2) == ["0", "1"], (
        "shared with the trainer"
    )


def test_a_trainer_of_several_ranks_has_as_many_gpus() -> None:
    eight = [str(gpu) for gpu in range(8)]
    assert assign_gpus("trainer", "trainer-0", eight, 2, 5) == ["0", "1", "2", "3", "4"]
    names = ["rollout-0", "rollout-1", "rollout-2"]
    assert [assign_gpus("rollout", name, eight, 2, 5) for name in names] == [["5", "6"]] * 3
    shared = [assign_gpus("rollout", name, ["0", "1"], 1, 2) for name in names]
    assert shared == [["0"], ["1"], ["0"]], "none is left"
    elsewhere = [assign_gpus("rollout", name, eight, 1, 0) for name in names]
    assert elsewhere == [["0"], ["1"], ["2"]], "a machine without the trainer"


def test_a_dry_run_needs_no_free_run_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    place = [f"run.output_dir={tmp_path}", "run.name=mine", "rollout.engine=emulated"]
    assert commands.run_command(["train", "--dry-run", *place]) == 0
    said = capsys.readouterr().out
    assert "training prompts" in said and "mine exists: add --move-old" in said
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
