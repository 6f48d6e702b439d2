"""What a replica is told with each trajectory: the weights' version and step, and the seed."""

from __future__ import annotations

from laminar.events import commands as cmd
from tools.kit.bench import Bench, only


def told(commands: list[cmd.Command], purpose: str = "train") -> list[cmd.GenerateTrajectory]:
    return [c for c in only(cmd.GenerateTrajectory, commands) if c.purpose == purpose]


def test_siblings_have_seeds_of_their_own() -> None:
    """With one seed all siblings are the same answer: no group has any signal."""
    bench = Bench(group_size=4, groups_per_step=2, capacity=8)
    generated = told(bench.start())
    assert len(generated) == 8 == len({c.seed for c in generated})


def test_the_second_pass_over_the_data_draws_other_numbers() -> None:
    """The same rows come again, under other group ids: the answers must not be those of the first
    pass."""
    bench = Bench(
        num_train=2, groups_per_step=1, max_staleness=0, capacity=2, total_steps=0, total_epochs=2
    )
    commands = bench.start()
    for _ in range(3):
        commands += bench.complete(*bench.open_groups())
        commands += bench.train()
        commands += bench.load_all()
    generated = told(commands)
    rows = [c.row_index for c in generated]
    assert sorted(rows[:4]) == sorted(rows[4:]) == [0, 0, 1, 1]
    assert {c.group for c in generated} == {"0.0", "0.1", "1.0", "1.1"}
    assert len({c.seed for c in generated}) == 8


def test_the_label_is_that_of_the_weights_that_the_replica_has_loaded() -> None:
    """Version v was made by step v; the store keeps the label, and the trainer corrects by it."""
    bench = Bench(groups_per_step=1, max_staleness=0, capacity=2, total_steps=3)
    commands = bench.start()
    for step in range(3):
        generated = told(commands)
        assert {(c.version, c.version_step) for c in generated} == {(step, step)}
        assert {(bench.trajectory(c.trajectory_id).step) for c in generated} == {step}
        bench.complete(*bench.open_groups())
        bench.train()
        commands = bench.load_all()
    assert bench.state.steps.staleness_max == 0


def test_staleness_is_counted_from_the_step_that_made_the_weights() -> None:
    """Two groups of version 0: one is trained by step 0, one by step 1."""
    bench = Bench(groups_per_step=1, max_staleness=1, capacity=4, groups_per_version=2)
    steps = bench.state.steps
    bench.start()
    bench.complete(*bench.open_groups()[:2])
    bench.train()
    bench.train()
    assert (steps.staleness_sum, steps.staleness_max) == (2, 1)  # of two siblings
