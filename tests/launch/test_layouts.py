"""Layouts for machines that need not exist, added up once more from shapes alone."""

from __future__ import annotations

import json
import re
import shutil
from argparse import Namespace
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest

from laminar.cli.commands import run_command
from laminar.cli.plan import load_plan
from laminar.launch import memory_check, sizing, train
from laminar.launch.layouts import Layout, layout_lines, list_changes, list_layouts
from laminar.launch.memory_check import MachineMemory, MemoryEstimate, check_memory, parse_machine
from laminar.names import exit_codes
from tests.launch.test_memory_check import SMALL, config
from tools.make import memory_page

ROOT = Path(__file__).parents[2]
GB, ROW = 1e9, 10_240
VOCABULARY, HEAD, KV = 151_936, 128, 8
RESERVE, RANK = 4 * GB, 16
EIGHT = memory_page.MORE | dict(
    zip(memory_page.NAMES.split(), memory_page.SHAPES["8B"], strict=True)
)


class Split(NamedTuple):
    """A way to use one machine's GPUs; several machines have the replicas on the others, too."""

    ranks: int
    size: int  #: GPUs of a replica
    offload: bool
    tokens: int
    share: float  #: of a GPU for vLLM
    shared: bool


class Model:
    """A Qwen3 by its shapes, without the package."""

    def __init__(self, name: str) -> None:
        self.h, inner, self.layers, self.heads, self.tied = memory_page.SHAPES[name.split(",")[0]]
        self.q, self.kv, self.inner = self.heads * HEAD, KV * HEAD, inner
        matrices = [
            (self.h, self.q), (self.h, self.kv), (self.h, self.kv), (self.q, self.h),
            (self.h, inner), (self.h, inner), (inner, self.h),
        ]  # fmt: skip
        self.matrices = self.layers * sum(a * b for a, b in matrices)
        self.layer = self.matrices // self.layers + 2 * self.h + 2 * HEAD
        self.table = VOCABULARY * self.h
        self.ends = self.table * (1 if self.tied else 2) + self.h
        self.all = self.layers * self.layer + self.ends
        self.lora = "LoRA" in name
        self.adapters = RANK * self.layers * sum(a + b for a, b in matrices) if self.lora else 0

    def trainer(self, split: Split) -> float:
        """Bytes of a GPU of the trainer, without the replica's share."""
        sharded = split.ranks > 1 or split.offload
        base = self.all * 4
        if self.lora and not sharded:  # matrices in bfloat16; what else there is in float32
            linear = self.matrices + (0 if self.tied else self.table)
            base = 2 * linear + 4 * (self.all - linear)
        state = base + 16 * self.adapters if self.lora else 16 * self.all
        layers, ends = (2, 1) if self.lora else (3, 2)  # a prefetched one; gradients if trained
        gathered = 4 * (layers * self.layer + ends * self.ends) if sharded else 0
        return gathered + self.of_pass(split, sharded) + (not split.offload) * state / split.ranks

    def of_pass(self, split: Split, sharded: bool) -> float:
        """Bytes of a pass: inputs of the layers, then the head or one layer computed again."""
        kept = split.tokens * (4 * self.h * self.layers + 4 * (4 * self.h + 2 * HEAD + 3))
        logits, table = 4 * 4 * 1024 * VOCABULARY, self.table
        cast = 2 * table if self.tied or sharded or not self.lora else 0
        head = logits + cast if self.lora else max(logits + cast + 4 * table, 3 * 4 * table)
        numbers = 5 * self.h + 2 * (self.q + self.kv) + 4 * self.inner
        again = 2 * numbers + 16 * self.h + 6 * (self.q + self.kv)
        again += -8 * self.h - 2 * self.kv if self.lora else 0  # frozen norms keep less
        layer = split.tokens * (again + 2 * self.inner)
        layer += 2 * self.matrices // self.layers if sharded or not self.lora else 0  # casts
        layer += 0 if self.lora else 4 * self.h * self.inner + (4 * table if self.tied else 0)
        return kept + max(head, layer)

    def host(self, split: Split) -> float:
        """Bytes of host memory of an offloaded run: state, copies, a version, three slots."""
        trained = self.adapters or self.all
        state = 4 * self.all + (16 * self.adapters if self.lora else 12 * self.all)
        return state + 4 * (self.all + 2 * trained + self.adapters) + 4 * 2 * self.all

    def fits(self, split: Split, gpu: float) -> bool:
        """Whether a GPU of the trainer, a GPU of a replica and its cache have room."""
        share = split.share * gpu
        on_trainer = self.trainer(split) + (share if split.shared else 0) + RESERVE
        one_row = ROW * 2 * 2 * self.layers * KV * HEAD / min(split.size, KV)
        return on_trainer <= gpu and share >= 2 * self.all / split.size + one_row


def split_of(layout: Layout, gpus: int) -> Split:
    trainer, rollout = layout.config.trainer, layout.config.rollout
    size, share = rollout.vllm.tensor_parallel_size, rollout.vllm.gpu_memory_utilization
    shared = layout.config.run.nodes == 1 and trainer.ranks + rollout.replicas * size > gpus
    tokens = max(trainer.micro_batch_tokens, ROW)
    return Split(trainer.ranks, size, trainer.offload == "all", tokens, share, shared)


def leanest_splits(model: Model, gpus: int, nodes: int) -> Iterator[Split]:
    """Yield every split, each with the least that a trainer and a replica take."""
    sizes = [size for size in (1, 2, 4, 8) if size <= gpus and not model.heads % size]
    for ranks, size, offload in product(range(1, gpus + 1), sizes, (False, True)):
        if nodes > 1 or ranks + size <= gpus:
            yield Split(ranks, size, offload, ROW, 0.85, shared=False)
        elif ranks == gpus:
            shares = (tenths / 10 for tenths in range(2, 9))
            yield from (Split(ranks, size, offload, ROW, share, shared=True) for share in shares)


def test_the_page_is_that_of_the_program_and_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layout that fits is added up from shapes, and where none fits no other split does."""
    planned = list(memory_page.plan_all())
    monkeypatch.setattr(memory_page, "plan_all", lambda: planned)
    assert memory_page.PAGE.read_text() == memory_page.page()
    assert len(planned) == 60 and 8 <= sum(layout is None for _, layout, _ in planned) <= 20
    machines = memory_page.MACHINES * 12
    for (name, layout, run), (_, nodes) in zip(planned, machines, strict=True):
        model, gpus = Model(name), run.machine.gpus
        assert run.model.parameters == model.all
        if layout is None:
            leanest = leanest_splits(model, len(gpus), nodes)
            assert not any(model.fits(split, gpus["0"]) for split in leanest), name
            continue
        split, found = split_of(layout, len(gpus)), layout.places[0]
        assert model.fits(split, gpus["0"]), (name, split)
        shared = split.share * gpus["0"] if split.shared else 0
        assert found[0].want == pytest.approx(model.trainer(split) + shared, rel=0.01), name
        if split.offload:
            assert found[-2].want == pytest.approx(model.host(split), rel=0.001), name


@pytest.fixture
def eight(tmp_path: Path) -> Path:
    """A model of 8.2 G parameters of which there is config.json only."""
    (tmp_path / "eight").mkdir()
    (tmp_path / "eight" / "config.json").write_text(json.dumps(EIGHT))
    return tmp_path / "eight"


def plan_alone(model: Path, machine: MachineMemory) -> MemoryEstimate:
    sizes = memory_check.read_planned_sizes("model.name", str(model))
    return MemoryEstimate(sizes, 1, machine)


def plan(*words: str) -> int:
    return run_command(["plan", "data.dataset=chain_sum", *words])


def test_config_json_alone_gives_the_numbers_of_the_preflight(tmp_path: Path) -> None:
    """Of models whose weights are there, too; without them the plan is the same."""
    machine = parse_machine("2x24", 100)
    for name in ("spell-0.6m", "calculator-0.6m"):
        (tmp_path / name).mkdir()
        shutil.copy(SMALL.parent / name / "config.json", tmp_path / name)
        run = MemoryEstimate(
            memory_check.read_planned_sizes("model.name", str(tmp_path / name)), 1, machine
        )
        vllm = {"rollout__engine": "vllm", "rollout__replicas": 1}
        for more in ({}, {"trainer__ranks": 2}, vllm):
            checked = check_memory(config(SMALL.parent / name, **more), 1, machine)
            assert run.list_places(config(tmp_path / name, **more)) == checked


@pytest.mark.parametrize("nodes", [[], ["--nodes", "2"]])
def test_a_first_run_has_the_best_layout(
    eight: Path, tmp_path: Path, nodes: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Written for GPUs that are not here, its plan fits and has work for each of them."""
    written = tmp_path / "my" / "run.toml"
    words = ["init", str(tmp_path / "my"), "--model", str(eight), "--gpus", "8x80", *nodes]
    assert run_command(words) == exit_codes.COMPLETE
    (tmp_path / "my" / "prompts.jsonl").unlink()  # a plan comes before the data
    assert run_command(["plan", "-c", str(written)]) == exit_codes.COMPLETE
    shown = capsys.readouterr().out
    assert "fits       yes\n" in shown and "  best: the settings as they are\n" in shown
    given = Namespace(gpus="", nodes=None, host_memory=0.0)
    found, run = load_plan(given, [str(written)], [])
    count, ranks = (16, 8) if nodes else (8, 4)
    assert found.run.nodes * len(run.machine.gpus) == count
    assert (found.trainer.ranks, found.total_replicas) == (ranks, count - ranks)
    assert found.model.name == str(eight) and found.rollout.max_num_seqs == 273


def test_the_plan_shows_three_layouts_and_the_memory_of_the_best(
    eight: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"model.name={eight}", "rollout.engine=vllm", "--gpus", "H100:8", "--host-memory", "1"]
    assert plan(*words) == exit_codes.FAILED
    assert "none fits; with --host-memory 250 one does" in capsys.readouterr().out
    assert plan(*words[:4]) == exit_codes.FAILED  # one rank is too few
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("fits       no: ") and "149.3 of 80.0 GB of GPU 0" in lines[2]
    start = next(index for index, line in enumerate(lines) if line.startswith("layouts "))
    rows = [line.split() for line in lines[start + 1 : start + 4]]
    assert [row[:4] for row in rows] == [
        ["best", "4", "4", "1"], ["second", "4", "2", "2"], ["third", "4", "1", "4"],
    ]  # fmt: skip
    assert [float(row[-1]) for row in rows] == [1.0, 0.96, 0.86]
    assert lines[start + 4] == "  best: rollout.replicas=4 trainer.ranks=4"
    assert any(
        re.fullmatch("best, 10.9 bytes +GPU 0,1,2,3 +GPU 4,5,6,7 .*", line) for line in lines
    )


def test_a_change_that_is_named_makes_it_fit(eight: Path) -> None:
    run = MemoryEstimate(
        memory_check.read_planned_sizes("model.name", str(eight)), 1, parse_machine("1x24")
    )
    asked = config(eight, rollout__engine="vllm")
    assert list_layouts(asked, run) == []
    changes = list_changes(asked, run)
    assert changes == ["--gpus 1x48", "--gpus 2x24", "--nodes 3 trainer.nodes=2"]
    apart = config(eight, rollout__engine="vllm", trainer__nodes=2, run__nodes=2)
    (layout, *_) = list_layouts(apart, run)
    assert (layout.config.trainer.shard, layout.config.replicas_on(0)) == ("node", 0)
    for change in changes[:2]:
        larger = MemoryEstimate(run.model, 1, parse_machine(change.split()[1]))
        assert list_layouts(asked, larger)
    shown = layout_lines(asked, run, [])
    assert shown == [f"layouts    none fits; with {' or '.join(changes)} one does"]


@pytest.mark.parametrize(("nodes", "fits"), [(1, False), (2, False), (4, True), (8, True)])
def test_a_trainer_of_several_machines_adds_up(
    nodes: int, fits: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """32B needs the GPUs of four machines, among which it is divided; a machine copies its part."""
    model, names = Model("32B"), memory_page.NAMES.split()
    shape = dict(zip(names, memory_page.SHAPES["32B"], strict=True))
    (tmp_path / "config.json").write_text(json.dumps(memory_page.MORE | shape))
    words = [f"trainer.nodes={nodes}", "trainer.ranks=8", f"--nodes={nodes + 1}", "--gpus=8x80"]
    settings = [f"{key}={value}" for key, value in memory_page.SETTINGS.items() if key[0] != "m"]
    code = run_command(["plan", *words, *settings, f"model.name={tmp_path}"])
    out = capsys.readouterr().out
    row = next(line.split() for line in out.splitlines() if line.startswith(f"  {nodes} "))
    split = Split(8 * nodes, 1, False, 16_384, 0.85, shared=False)
    assert float(row[3]) == pytest.approx(model.trainer(split) / GB, abs=0.3)
    assert (row[2], row[5]) == ("all" if nodes > 1 else "-", "yes" if fits else "no")
    assert code == (exit_codes.COMPLETE if fits else exit_codes.FAILED)
    assert f"machines   {nodes + 1} with 8 GPUs each" in out


def test_the_dry_run_prints_the_layouts_of_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = parse_machine("2x24", 100)
    for module in (memory_check, sizing, train):
        monkeypatch.setattr(module, "this_machine", lambda: here)
    quick = [
        "-c",
        str(ROOT / "configs" / "recipes" / "words" / "run.toml"),
        f"run.output_dir={tmp_path}",
    ]
    assert run_command(["train", *quick, "--dry-run"]) == exit_codes.COMPLETE
    dry = capsys.readouterr().out
    assert run_command(["plan", *quick, "--gpus", "2x24"]) == exit_codes.COMPLETE
    planned = capsys.readouterr().out
    table = planned[planned.index("layouts ") : planned.index("(docs/memory.md)")]
    assert table in dry and table.split()[10] == "best" and "estimates" in table


@pytest.mark.parametrize(
    ("words", "said", "lacking"),
    [
        ("plan --gpus 8x", "--gpus = '8x': give 1 to 64 GPUs", ""),
        ("plan --gpus H100:0", "--gpus = 'H100:0': give 1 to 64 GPUs", ""),
        ("plan --gpus H1:8", "with one of A10, A100-40, A100-80", ""),
        ("plan --gpus 8x80 --nodes 0", "run.nodes", ""),
        ("plan --gpus 8x80 --nodes 2 trainer.nodes=4", "--nodes = 2 is less than", ""),
        ("plan --gpus 8x80 --host-memory nan", "--host-memory = nan", ""),
        ("plan --host-memory 9", "with --gpus", ""),
        ("plan run.planned_gpus=8x80x2", "run.planned_gpus = '8x80x2'", ""),
        ("plan --gpus 8x80 rollout.engine=emulated", "nothing to plan", ""),
        ("plan --gpus 8x80", "config.json lacks hidden_size", "hidden_size"),
        ("plan --gpus 8x80", "no model_type = 'None'", "model_type"),
        ("plan --gpus 8x80 model.name=/none", "model.name = '/none'", ""),
        ("init my --model eight --gpus H100:0", "--gpus = 'H100:0'", ""),
        ("init my --model eight --gpus 8x80", "config.json lacks head_dim", "head_dim"),
        ("init my --model eight --gpus 1x24", "none fits; with --gpus 1x48 one does", ""),
        ("init my --model eight", "give both", ""),
        ("init my --gpus 8x80", "give both", ""),
    ],
)
def test_a_mistake_is_one_sentence_and_nothing_is_written(
    words: str, said: str, lacking: str, eight: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    fields = {key: value for key, value in EIGHT.items() if key != lacking}
    (eight / "config.json").write_text(json.dumps(fields))
    monkeypatch.chdir(eight.parent)
    command, *given = words.split()
    more = ["data.dataset=chain_sum", "model.name=eight"] if command == "plan" else []
    assert run_command([command, *more, *given]) == exit_codes.USER_ERROR
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and "Traceback" not in error
    assert [path.name for path in eight.parent.iterdir()] == ["eight"]
