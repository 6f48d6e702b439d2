"""Stages of `laminar train`: check, prepare the run directory, start, watch, report.

Reads   a configuration, the run directory of a run that is resumed
Writes  the run directory; the plan before a run, its summary after it
Starts  the processes of the run, through the supervisor; with --prepare nothing
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from laminar.analysis.log.evaluations import format_accuracy, format_score, is_shaped
from laminar.analysis.report.figures import RunFigures
from laminar.analysis.report.summary import summarize_figures, write_summary
from laminar.analysis.report.summary_lines import format_count, range_line
from laminar.cluster.slurm import resume_command
from laminar.config import Config, ConfigError
from laminar.config.algorithm_rules import OWN_AGGREGATION
from laminar.coordinator.restarts import GiveUp
from laminar.coordinator.takeover import ResumeRequest
from laminar.core.state.failures import Failure, FailureKind
from laminar.engines.check import probe_vllm
from laminar.events.base import COORDINATOR
from laminar.launch import preflight, resume_check
from laminar.launch.env_check import show_beginnings
from laminar.launch.exit_handling import print_error
from laminar.launch.layouts import layout_lines, list_layouts
from laminar.launch.memory_check import check_memory, estimate_memory, memory_lines, this_machine
from laminar.launch.panel import failed_share
from laminar.launch.preflight import RunPlan, check_settings, find_idle_gpus
from laminar.launch.prefork import PreforkedNode
from laminar.launch.reward_check import show_trial
from laminar.launch.sizing import decide_shard
from laminar.launch.supervisor import StopRequest, Supervisor, node_args
from laminar.launch.terminal import Terminal
from laminar.names import exit_codes
from laminar.observe.logs import create_attempt
from laminar.run import directory
from laminar.run.command_line import shell_command
from laminar.run.lock import RunLock, holders, in_use, lock_for_move
from laminar.run.renames import rename
from laminar.run.secret import make_secret
from laminar.run.user_code import write_config

LOST_SHOWN = 4  #: most reasons shown for lost processes; summary.json has all
WRAPPED = (
    "           a string, in the model's chat template (TRL: as it is); data.apply_chat_template = "
    "false leaves it as it is"
)
CLOSED = "the output is closed; the run continues, and `{}` ends it"
UNHANDLED = "an event could not be handled: the coordinator's last line names it and the error"


class StartFiles(NamedTuple):
    """Files that a new run begins with: a fork's checkpoint, a program's objects."""

    name: str
    lines: list[str]  #: of the plan
    take: Callable[[Path], None]  #: copies them into the new run directory; may raise OSError


def run_training(
    config: Config,
    run_dir: Path,
    arguments: argparse.Namespace,
    files: StartFiles | None = None,
    console: Terminal | None = None,
    asked: StopRequest | None = None,
) -> GiveUp:
    """Check, start, watch and report a run; return how it ended, with its failure.

    `asked`: stop requests of another thread, in the place of signals."""
    console = console or Terminal()
    config = check_settings(config, alone=not arguments.prepare)
    starts = not (arguments.dry_run or arguments.prepare)
    with contextlib.ExitStack() as ends:
        early = _prefork_nodes(config, ends) if starts else []
        machines = 1 if arguments.prepare else len(config.node_names)
        plan, found = plan_run(config, run_dir, arguments, files, console, machines, early)
        console.print_lines([f"WARNING: {text}" for text in found.values() if not starts])
        if arguments.dry_run:
            return _end_dry_run(run_dir, arguments, console)
        asking = ResumeRequest.RESUME if arguments.resume else ResumeRequest.NOTHING
        signals = StopRequest() if asked is None else contextlib.nullcontext(asked)
        with signals as asked:  # before the directory exists, so that none is left incomplete
            if not arguments.resume and run_dir.exists():
                console.print_lines([f"moved the old run to {move_aside(run_dir)}"])
            place = resume_check.claim_run_directory if arguments.resume else prepare_directory
            lock = ends.enter_context(contextlib.closing(place(plan.config, run_dir, found)))
            if files is not None:
                _take_files(files, run_dir)
            if arguments.prepare:
                console.print_lines(_format_daemons(plan.config, run_dir))
                return GiveUp(_get_exit_code(console))
            if asked.level and not arguments.resume:  # its coordinator has not started
                shutil.rmtree(run_dir)
                return GiveUp.after_failure(FailureKind.STOPPED_EARLY, asked.reason)
            console.when_gone(CLOSED.format(shell_command("stop", run_dir)))
            over = Supervisor(plan.config, lock, console, asked, early, asking=asking).run()
        if reason := lock.find_lost_reason():
            console.print_lines(["", f"the run ended    {reason}"])
            return over
        return report_end(run_dir, console, over)


def _end_dry_run(run_dir: Path, arguments: argparse.Namespace, console: Terminal) -> GiveUp:
    if run_dir.exists() and not arguments.resume:
        console.print_lines([f"{run_dir} exists: add --move-old, or another run.name"])
    return GiveUp(_get_exit_code(console))


def _prefork_nodes(config: Config, ends: contextlib.ExitStack) -> list[PreforkedNode]:
    """Start importing nodes, which `ends` closes."""
    nodes = (PreforkedNode(config, dict(config.processes_on(n))) for n in config.node_names)
    return [ends.enter_context(contextlib.closing(node)) for node in nodes]


def plan_run(
    config: Config,
    run_dir: Path,
    arguments: argparse.Namespace,
    files: StartFiles | None,
    console: Terminal,
    machines: int,
    early: Sequence[PreforkedNode] = (),
) -> tuple[RunPlan, dict[str, str]]:
    """Show the plan; return it with its warnings; raise ConfigError if the run cannot start.

    `machines`: number of the run's nodes that are this machine; with 0 it is not checked.
    """
    config = decide_shard(config, machines)
    places = check_memory(config, machines) if machines else []
    asked = probe_vllm(config) if machines else contextlib.nullcontext(lambda: None)
    with asked as vllm_takes_it:
        known = resume_check.find_data_digest(run_dir) if arguments.resume else ""
        plan = (early[0] if early else preflight).look_at_data(config)
        if arguments.resume:
            resume_check.check_unchanged(directory.run_config(run_dir), plan.config)
            resume_check.check_data(run_dir, known, plan.data_digest)
            plan.warnings.update(resume_check.find_changed_files(run_dir, plan.config))
        vllm_takes_it()
    console.print_lines([*plan_lines(plan), *memory_lines(places)])
    if places and config.run.nodes == 1 and arguments.dry_run:
        run = estimate_memory(config, 1, this_machine())
        console.print_lines(layout_lines(config, run, list_layouts(config, run)))
    console.print_lines(files.lines if files is not None else [])
    found = plan.warnings | (find_idle_gpus(plan.config) if machines else {})
    if plan.config.reward.trial and plan.resets:
        show_beginnings(plan.config, plan.resets, console)
    if plan.config.reward.trial and plan.trial:
        found |= show_trial(plan.reward, plan.config.reward, plan.trial, console)
    return plan, found


def _get_exit_code(console: Terminal) -> int:
    return exit_codes.PIPE_CLOSED if console.gone else exit_codes.COMPLETE


def _format_daemons(config: Config, run_dir: Path) -> list[str]:
    """Return the commands that run a prepared run."""
    nodes = [node_args(config, name) for name in config.node_names]
    return [
        f"prepared; start these in {Path.cwd()}, with a laminar-node on each machine:",
        f"  laminar-coord {run_dir}",
        *(f"  laminar-node {run_dir} {' '.join(words)}" for words in nodes),
    ]


def place_of(config: Config, move_old: bool, *, dry_run: bool = False) -> Path:
    """Return the directory of a new run; raise ConfigError if it exists and may not be moved.

    A dry run takes no directory, so an existing one is left alone.
    """
    run_dir = config.run_dir
    if dry_run:
        return run_dir
    if run_dir.exists() and holders(run_dir):
        raise ConfigError(in_use(run_dir))
    if os.path.lexists(run_dir) and not move_old:
        raise ConfigError(
            f"run directory {run_dir} exists; give another run.name, --move-old to keep it under "
            f"another name, or --resume {run_dir} to continue it"
        )
    return run_dir


def report_end(run_dir: Path, console: Terminal, over: GiveUp) -> GiveUp:
    """Print the closing lines and return how the run ended, with the logged failure.

    The lines have no influence on the outcome.
    """
    try:
        run = RunFigures(run_dir)
        summary, failed = summarize_figures(run), run.state.run.failed or over.failure
        if over.code == exit_codes.FAILED and failed is None:
            failed = Failure(FailureKind.NOT_HANDLED, COORDINATOR, detail=UNHANDLED)
        over = GiveUp(over.code, failed)
        lines = [*summary_lines(summary, run_dir, over), *_write_summary(run_dir, summary)]
    except ConfigError as error:  # the coordinator ended before it had logged anything
        lines = [f"no summary: {error}"]
        lines += [f"the run FAILED   {over.failure.sentence}"] if over.failure else []
    except KeyboardInterrupt:
        shown = shell_command("report", run_dir)
        lines = [f"no summary: interrupted; the run is over, `{shown}` shows it"]
    console.print_lines(lines)
    console.flush_output()
    if console.gone:
        print_error(
            "laminar",
            f"{run_dir} has ended with code {over.code}; `{shell_command('report', run_dir)}`",
        )
    return over


def _write_summary(run_dir: Path, summary: dict[str, Any]) -> list[str]:
    """Write the summary; return a line about it if that fails."""
    try:
        write_summary(run_dir, summary)
    except ConfigError as error:
        return [f"not kept         {error}; `{shell_command('report', run_dir)}` writes it"]
    return []


def move_aside(run_dir: Path) -> Path:
    """Rename a run directory to the first free NAME.N; raise ConfigError if its run is active."""
    number = 1
    with lock_for_move(run_dir):
        while (target := run_dir.with_name(f"{run_dir.name}.{number}")).exists():
            number += 1
        rename(run_dir, target, durable=True)
    return target


def prepare_directory(config: Config, run_dir: Path, warnings: dict[str, str]) -> RunLock:
    """Create the directory, locked before it has contents; the coordinator emits the warnings."""
    try:
        run_dir.mkdir(0o700, parents=True)
        run_dir.chmod(int(config.run.mode, 8))
        lock = RunLock.create(run_dir, "train")
        make_secret(run_dir)
        write_config(config, run_dir)
        if warnings:
            (run_dir / directory.FIRST_LOOK_FILE).write_text(json.dumps(warnings))
        create_attempt(run_dir)
        return lock
    except FileExistsError:
        raise ConfigError(in_use(run_dir)) from None
    except OSError as error:
        raise ConfigError(f"run directory {run_dir} cannot be written: {error}") from None


def _take_files(files: StartFiles, run_dir: Path) -> None:
    """Take the files into the run directory; remove the directory on failure."""
    try:
        files.take(run_dir)
    except OSError as error:
        shutil.rmtree(run_dir)
        raise ConfigError(f"{files.name} cannot be copied to {run_dir}: {error}") from None


def plan_lines(plan: RunPlan) -> list[str]:
    """Return the plan in a few lines, with the first prompt as the model sees it."""
    c = plan.config
    prompt = [
        f"prompt 0   {plan.first_prompt!r}",
        *([WRAPPED] if plan.is_wrapped else []),
        f"as ids     {plan.first_prompt_ids}",
        f"ends with  {plan.end_ids}",
    ]
    return [
        f"run        {c.run_dir}",
        f"model      {_format_model(c)}",
        f"data       {plan.num_train} training prompts, {plan.num_held_out} held out "
        f"({plan.overlap} further rows left out because their prompt is held out)",
        f"steps      {plan.steps} of {c.data.train_batch_size} prompts x "
        f"{c.rollout.group_size} responses, staleness at most {c.async_.max_staleness}",
        f"replicas   {c.total_replicas} ({c.rollout.engine} engine, "
        f"{c.rollout.max_num_seqs} sequences each)",
        *_format_trainer(c),
        *_format_objective(c),
        *([] if c.is_emulated else prompt),
    ]


def _format_trainer(c: Config) -> list[str]:
    """Return the nodes of the trainer, if it has several."""
    nodes, ranks, shard = c.trainer.nodes, c.trainer.ranks, c.trainer.shard
    among = "of each node" if shard == "node" else "of all nodes"
    text = f"trainer    {nodes} nodes of {ranks} ranks; the model is divided among those {among}"
    return [f"{text} (trainer.shard = {shard!r})"] if nodes > 1 else []


def _format_objective(c: Config) -> list[str]:
    """Return the objective of training, if it is not the default."""
    a = c.algorithm
    loss, own = a.policy_loss.loss_mode, OWN_AGGREGATION.get(a.policy_loss.loss_mode)
    if (loss, a.adv_estimator) == ("vanilla", "grpo"):
        return []
    summed = f"{own}, regardless of algorithm.loss_agg_mode" if own else a.loss_agg_mode
    return [f"loss       {loss} ({summed}), advantages {a.adv_estimator}"]


def _format_model(c: Config) -> str:
    return f"emulated, {c.emulation.weights_mb} MiB" if c.is_emulated else c.model.name


def summary_lines(summary: dict[str, Any], run_dir: Path, over: GiveUp) -> list[str]:
    """Return the last lines: the outcome, where to look next, and how to resume."""
    lines = [""]
    if over.code == exit_codes.PAUSED:
        lines.append("the run is paused; unfinished work is saved")
    elif over.code == exit_codes.STOPPED_EARLY and over.failure:
        lines.append(f"the run ended    {over.failure.sentence}")
    elif over.failure:
        lines += [
            f"the run FAILED   {over.failure.sentence}",
            f"what to do       {over.failure.kind.record.remedy}",
            f"what led to it   {run_dir}/logs/latest/*.jsonl; "
            f"{shell_command('log', 'dump', '-n', 20, run_dir)}",
        ]
    lines += _format_losses(summary["lost_by"])
    if summary["resumable"]:
        lines.append(f"resume with      {resume_command(run_dir)}")
    lines += _format_evaluations(summary["evaluations"])
    if len(summary["evaluations"]) > 1:
        ranges = summary["eval_by_prompt_length"]
        lines += [f"  by prompt      {range_line(found)}" for found in ranges]
    lines += [
        f"steps            {summary['steps']} in {summary['seconds']:.0f} s, "
        f"{_format_skipped(summary)}"
        f"{summary['trajectories_trained']} trajectories trained, "
        f"{summary['weight_versions']} weight versions",
        f"staleness        mean {summary['staleness_mean']:.2f}, max {summary['staleness_max']}",
        *_reward_errors(summary, run_dir),
        *(f"WARNING          {text}" for text in summary["warnings"].values()),
        f"look at          {shell_command('report', run_dir)}; {shell_command('samples', run_dir)}",
        f"figures          {run_dir / directory.SUMMARY_FILE}, {run_dir / directory.METRICS_FILE}, "
        f"{run_dir / directory.TENSORBOARD_DIR}",
        f"and try          {shell_command('log', 'replay', run_dir)}; "
        f"{shell_command('audit', run_dir)}",
    ]
    saved = len(list((run_dir / directory.CHECKPOINTS_DIR).glob("step_*")))
    if saved:
        lines.append(f"checkpoints      {saved} in {run_dir / directory.CHECKPOINTS_DIR}")
    if (run_dir / directory.EXPORT_DIR).is_dir():
        lines.append(f"model            {run_dir / directory.EXPORT_DIR}")
    return lines


def _format_skipped(summary: dict[str, Any]) -> str:
    count = summary["steps_unchanged"]
    return f"{format_count(count, 'skipped update', 'skipped updates')}, " if count else ""


def _format_losses(lost_by: dict[str, str]) -> list[str]:
    """Return the reasons of lost processes, with the first process for each reason."""
    by_reason = {reason: name for name, reason in reversed(lost_by.items())}
    lines = [f"lost             {name}: {reason}" for reason, name in by_reason.items()]
    more = [
        f"lost             {len(lost_by)} processes in all, see lost_by in {directory.SUMMARY_FILE}"
    ]
    return lines[:LOST_SHOWN] + (more if len(lines) > LOST_SHOWN else [])


def _format_evaluations(evaluations: list[dict[str, Any]]) -> list[str]:
    """Return the first and last evaluation score; for a shaped reward also the mean score."""
    if len(evaluations) < 2:
        return []
    first, last = evaluations[0], evaluations[-1]
    of_what = " (the exported model)" if last["final"] else ""
    shaped = is_shaped(first) or is_shaped(last)
    lines = (
        [f"held-out score   {format_score(first)} -> {format_score(last)}{of_what}"]
        if shaped
        else []
    )
    name = "accuracy         " if shaped else "held-out score   "
    return [*lines, f"{name}{format_accuracy(first)} -> {format_accuracy(last)}{of_what}"]


def _reward_errors(summary: dict[str, Any], run_dir: Path) -> list[str]:
    if not summary["reward_errors"]:
        return []
    errors = {"answers": summary["reward_answers"], "by_reason": summary["reward_errors"]}
    return [
        f"reward FAILED    {failed_share(errors)}",
        f"the first time   {summary['reward_error_first']}",
        f"what it printed  {run_dir}/logs/latest/*.reward.log",
    ]
