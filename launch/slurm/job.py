"""Runs a batch job that starts the ranks and requeues itself until the run is finished.

    launch/slurm/pretrain_gpt.sbatch  ->  this, once per allocation, on its first node
        |  config        is checked before any task starts; a finished run ends the job
        |  srun          starts one task per GPU; SIGUSR1 before the time limit reaches all ranks, which save
        |  judge         finished | preempted | stopped | failed | mistake | diverged | interrupted
        |  slurm.json    records who failed where, and whether there was progress
        v
    scontrol requeue     or, if the site refuses that, sbatch --dependency=afterany of the same script

SLURM shows a requeued job and a cancelled one as COMPLETING. Only a requeued job has a higher restart count. A cancelled job must
never come back.
"""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TextIO

from triaxis.engine.config.load import load_config
from triaxis.engine.config.rules.check import require_legal
from triaxis.engine.config.tree import Config
from triaxis.engine.errors import ExitCode, attempt_name
from triaxis.engine.program import ROOT
from triaxis.engine.run.directory import RunDirectory, run_name
from triaxis.engine.run.entries import next_attempt
from triaxis.engine.storage.state_files import read_regular
from triaxis.launch.cli import command_module, command_parser
from triaxis.launch.commands.train import request
from triaxis.launch.slurm.allocation import Job, call, check_lead, job_fields, say, seconds_of
from triaxis.launch.slurm.history import ATTEMPTS_WITHOUT_PROGRESS, FAILURES_TO_EXCLUDE, History, Outcome
from triaxis.launch.slurm.srun_report import StepReport
from triaxis.launch.start.gpu_memory import memory_rules
from triaxis.launch.start.launcher import FROM_SCRATCH, default_config
from triaxis.launch.start.preflight import look_before_training
from triaxis.launch.start.process.ending import exit_code
from triaxis.launch.start.process.failure import OTHERS_END_SECONDS
from triaxis.launch.start.process.front import drop_output, standard_streams
from triaxis.launch.start.process.lasting_output import lasting_output
from triaxis.launch.start.srun_task import LOOPBACK
from triaxis.models.run_rules import RULES_OF_A_RUN

DRY_RUN = "--dry-run"

FINAL = {
    Outcome.MISTAKE: ExitCode.MISTAKE,
    Outcome.DIVERGED: ExitCode.DIVERGED,
    Outcome.INTERRUPTED: ExitCode.INTERRUPTED,
}
"""The job's exit codes after outcomes that no new attempt follows."""

BINDING = {"SLURM_DISTRIBUTION": "--distribution=block:block", "SLURM_CPU_BIND": "--cpu-bind=cores"}
"""srun's options that keep a task on neighbouring cores, by the variable with which a user gives another choice.

Without them SLURM may spread a task over sockets, far from its GPU and from its own memory."""

LONGEST_END_SECONDS = 90.0
"""Longest time for srun to end the other tasks after a bad end; then it is killed, since it waits in vain for a dead node."""


# The step -----------------------------------------------------------------------------------------------------------------


def step_words(root: Path, words: Sequence[str], variables: Mapping[str, str]) -> list[str]:
    """Return the srun command that starts one rank per task.

    Args:
        root: checkout root.
        words: config, overrides and flags.
        variables: SLURM_CPUS_PER_TASK, those of `BINDING`, and a site's TRIAXIS_SRUN, TRIAXIS_CONTAINER,
            TRIAXIS_CONTAINER_MOUNTS.
    """
    # A dead rank ends the step: otherwise the others would wait for it until their timeout.
    srun = ["srun", "--kill-on-bad-exit=1"]
    if cpus := variables.get("SLURM_CPUS_PER_TASK"):
        srun.append(f"--cpus-per-task={cpus}")  # srun does not inherit it from sbatch
        srun += [option for name, option in BINDING.items() if not variables.get(name)]
    if image := variables.get("TRIAXIS_CONTAINER"):
        mounts = [f"{folder}:{folder}" for folder in dict.fromkeys((str(root), str(Path.cwd())))]
        mounts += [variables["TRIAXIS_CONTAINER_MOUNTS"]] if variables.get("TRIAXIS_CONTAINER_MOUNTS") else []
        srun += [f"--container-image={image}", f"--container-mounts={','.join(mounts)}"]
        srun.append(f"--container-workdir={Path.cwd()}")
    srun += shlex.split(variables.get("TRIAXIS_SRUN", ""))
    return [*srun, "bash", str(root / "launch" / "pretrain_gpt.sh"), *words]


def step_variables(job: Job, variables: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of `variables` for the ranks, with additions.

    These are MASTER_ADDR on several nodes if it is missing, and TRIAXIS_PYTHON in a container.
    """
    environment = dict(variables)
    if not variables.get("MASTER_ADDR") and len(job.nodes) > 1 and (address := _node_address(job.nodes[0])):
        environment["MASTER_ADDR"] = address
    if variables.get("TRIAXIS_CONTAINER"):
        environment["TRIAXIS_PYTHON"] = variables.get("TRIAXIS_CONTAINER_PYTHON", "python3")
    return environment


def _node_address(node: str) -> str | None:
    """Return the address at which SLURM reaches a node; None if it is unknown or a loopback."""
    match = re.search(r"\bNodeAddr=(\S+)", call("scontrol", "show", "node", "--oneliner", node).stdout)
    return match[1] if match and match[1] not in LOOPBACK else None


class SrunStep:
    """The ranks that srun runs in this allocation.

    Attributes:
        received: last signal that came before a task ended badly; None: there was none.
    """

    def __init__(self, job: Job) -> None:
        self.report = StepReport(job.nodes, job.tasks_per_node)
        self.received: signal.Signals | None = None
        self._srun: subprocess.Popen[str] | None = None
        self._bad_since_seconds: float | None = None
        self._others_are_killed = False

    def run(self, words: Sequence[str], variables: Mapping[str, str]) -> int:
        """Run srun and return its exit code.

        After a task fails, the others are killed after `OTHERS_END_SECONDS`, and srun after `LONGEST_END_SECONDS`.
        """
        self._srun = subprocess.Popen(
            words, env=variables, stderr=subprocess.PIPE, text=True, errors="backslashreplace"
        )
        if self.received is not None:
            self._srun.send_signal(signal.SIGUSR1)
        assert self._srun.stderr is not None, "a pipe"
        reader = threading.Thread(target=self._relay, args=(self._srun.stderr,), daemon=True)
        reader.start()
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._srun.wait(1.0)
                break
            bad = self._bad_since_seconds
            if bad is not None and time.monotonic() - bad > OTHERS_END_SECONDS:
                self._kill_others()
            if bad is not None and time.monotonic() - bad > LONGEST_END_SECONDS:
                say(f"srun still runs {LONGEST_END_SECONDS:g} seconds after a task failed, so it is killed")
                self._srun.kill()
                self._srun.wait()
                break
        reader.join(5.0)
        return self._srun.returncode

    def _kill_others(self) -> None:
        """Send SIGKILL to tasks that have not ended. SLURM itself would wait for KillWait, which may be long."""
        if self.report.step and not self._others_are_killed:
            self._others_are_killed = True
            say(f"tasks that still run {OTHERS_END_SECONDS} seconds after one failed are killed")
            call("scancel", "--signal=KILL", self.report.step)

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Forward SIGUSR1 to the ranks. SLURM itself sends them SIGTERM.

        `received` records the signal, unless a task has already ended badly.
        """
        if not self.report.is_bad:
            self.received = signal.Signals(number)
        if number == signal.SIGUSR1 and self._srun is not None:
            self._srun.send_signal(signal.SIGUSR1)

    def _relay(self, stream: TextIO) -> None:
        """Copy srun's standard error to ours, and parse each line."""
        for line in stream:
            sys.stderr.write(line)
            sys.stderr.flush()
            self.report.read(line)
            if self.report.is_bad and self._bad_since_seconds is None:
                self._bad_since_seconds = time.monotonic()


def judge(code: int, report: StepReport, received: signal.Signals | None) -> Outcome:
    """Classify how an attempt ended.

    All ranks agree on some exit codes, such as REQUEUE. One rank that ends with such a code is enough.
    """
    if report.has_code(ExitCode.REQUEUE):
        return Outcome.PREEMPTED
    if report.has_code(ExitCode.NEXT_PHASE):
        # Ranks were asked to stop at a phase's end: no time is left for another phase in this allocation.
        return Outcome.NEXT_PHASE if received is None else Outcome.PREEMPTED
    if report.has_code(ExitCode.INTERRUPTED):
        return Outcome.INTERRUPTED
    if code == 0:
        return Outcome.FINISHED
    if report.has_code(ExitCode.MISTAKE):
        return Outcome.MISTAKE
    if report.has_code(ExitCode.DIVERGED):
        return Outcome.DIVERGED
    return Outcome.FAILED if received is None else Outcome.STOPPED


# The next attempt ---------------------------------------------------------------------------------------------------------


class NextAttempt:
    """The next attempt, which is the same job requeued or a new job in its place.

    Args:
        job: current job.
        script: batch script, as SLURM stores it for this job.
        words: command line for a new job.
        name: the run's name, which a new job keeps.
        starts_over: whether a new job is started with `--from-scratch` again.
    """

    def __init__(self, job: Job, script: str, words: Sequence[str], name: str, *, starts_over: bool = False) -> None:
        self._job = job
        self._script = script
        self._words = [word for word in words if word != FROM_SCRATCH or starts_over]
        self._name = name

    def start(self, excluded: Sequence[str]) -> bool:
        """Requeue the job without the `excluded` nodes, or submit another. False if the job was cancelled or SLURM refused."""
        fields = job_fields(self._job.number)
        if int(fields.get("Restarts") or 0) > self._job.restart:
            say("SLURM requeues this job itself")
            self._exclude(fields, excluded)
            return True
        if fields.get("JobState", "RUNNING") != "RUNNING" and not is_out_of_time(fields):
            say(
                f"this job is {fields['JobState']}, but its launcher did not end it: it was cancelled, so it is not "
                "started again"
            )
            return False
        # A requeue ends every process in the job, including the command that excludes a node: this one must survive SIGTERM.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        requeued = call("scontrol", "requeue", self._job.number)
        if not requeued.returncode:
            say(f"requeued with `scontrol requeue {self._job.number}`")
            self._exclude(fields, excluded)
            return True
        say(f"`scontrol requeue {self._job.number}` was refused: {requeued.stderr.strip()}")
        return self._submit(fields, excluded)

    def _exclude(self, fields: Mapping[str, str], excluded: Sequence[str]) -> None:
        others = [fields["ExcNodeList"]] if fields.get("ExcNodeList", "(null)") != "(null)" else []
        if not excluded:
            return
        names = ",".join([*others, *excluded])
        updated = call("scontrol", "update", f"JobId={self._job.number}", f"ExcNodeList={names}")
        if updated.returncode:
            say(
                f"{', '.join(excluded)} failed {FAILURES_TO_EXCLUDE} times but cannot be excluded: {updated.stderr.strip()}"
            )
            return
        say(
            f"excluded after {FAILURES_TO_EXCLUDE} failures: {', '.join(excluded)}. If too few other nodes are left, "
            f"the job waits; to clear the exclusion: scontrol update JobId={self._job.number} ExcNodeList="
        )

    def _submit(self, fields: Mapping[str, str], excluded: Sequence[str]) -> bool:
        # This job's variables would act as options for the new job, so they are removed; SLURM_CONF locates SLURM.
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SLURMD_"))}
        kept |= {name: os.environ[name] for name in ("SLURM_CONF",) if name in os.environ}
        words = submit_words(self._job, self._script, self._words, fields, os.environ, excluded)
        submitted = call(*words, variables=kept | {"RUN_NAME": self._name})
        if submitted.returncode:
            say(
                f"a dependent job could not be submitted either: {submitted.stderr.strip()}. "
                f"Submit again with RUN_NAME={self._name}"
            )
            return False
        say(f"instead, a job that starts when this one has ended: {submitted.stdout.strip()} (run {self._name})")
        return True


def submit_words(
    job: Job,
    script: str,
    words: Sequence[str],
    fields: Mapping[str, str],
    variables: Mapping[str, str],
    excluded: Sequence[str],
) -> list[str]:
    """Return the sbatch command for a new job with this job's resources.

    Args:
        job: current job.
        script: batch script.
        words: config and overrides.
        fields: output of `scontrol show job`.
        variables: the job's environment.
        excluded: nodes to exclude.
    """
    options = [f"--dependency=afterany:{job.number}", f"--nodes={len(job.nodes)}"]
    options.append(f"--ntasks-per-node={job.tasks_per_node[0]}")
    for option, value in (
        ("partition", fields.get("Partition")),
        ("account", fields.get("Account")),
        ("qos", fields.get("QOS")),
        ("time", fields.get("TimeLimit")),
        ("job-name", fields.get("JobName")),
        ("chdir", fields.get("WorkDir")),
        ("output", fields.get("StdOut")),
        ("cpus-per-task", variables.get("SLURM_CPUS_PER_TASK")),
        ("gpus-per-node", variables.get("SLURM_GPUS_PER_NODE")),
        ("mem", variables.get("SLURM_MEM_PER_NODE")),
        ("exclude", ",".join(excluded)),
    ):
        if value and value not in ("(null)", "N/A", "UNLIMITED"):
            options.append(f"--{option}={value}")
    return ["sbatch", "--parsable", *options, script, *words]


def is_out_of_time(fields: Mapping[str, str]) -> bool:
    """Whether a job has reached its time limit, and so was not cancelled."""
    limit, ran = (seconds_of(fields.get(name, "")) for name in ("TimeLimit", "RunTime"))
    return limit is not None and ran is not None and ran >= limit


# The job ------------------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    """Run one allocation, given `[script, config.yaml, section.key=value ..., --from-scratch, --dry-run]`; return its exit code."""
    return exit_code(_start, argv)


def _start(argv: Sequence[str]) -> int:
    script, *words = argv
    if DRY_RUN in words:
        try:
            _show(ROOT, [word for word in words if word != DRY_RUN])
            sys.stdout.flush()
        except BrokenPipeError:  # `... | head` has read enough
            drop_output()
        return 0
    with lasting_output():
        return _run(ROOT, script, words)


def _run(root: Path, script: str, words: Sequence[str]) -> int:
    job = Job.from_variables(os.environ)
    step = _listening(job)
    header = b""
    with contextlib.suppress(OSError):  # then only SBATCH_SIGNAL is known
        header = read_regular(Path(script))
    check_lead(header.decode(errors="replace"), job_fields(job.number), os.environ)
    config, path = _config(words, job)
    name = run_name(config, path.stem, os.environ)
    directory = RunDirectory.join(config.runtime.runs_dir, name, 0)
    starts_over = FROM_SCRATCH in words and (not job.restart or directory.is_starting_over)
    if (finished := look_before_training(config, path, from_scratch=starts_over)) is not None:
        print(finished)
        return 0
    history, asked = History(directory.path), list(words)
    while True:
        attempt = attempt_name(next_attempt(directory.path))  # as the ranks will name it
        history.begin(job.number, job.restart, job.nodes, newest_step(directory, config))
        code = step.run(step_words(root, asked, os.environ), step_variables(job, os.environ))
        outcome = judge(code, step.report, step.received)
        if outcome is not Outcome.NEXT_PHASE:
            break
        history.end(outcome, newest_step(directory, config), [])
        say(
            f"a phase has ended and is saved (step {newest_step(directory, config)}); the next one starts in this allocation"
        )
        # Checkpoints that this job has saved so far must not be set aside.
        step, asked = _listening(job), [word for word in asked if word != FROM_SCRATCH]
    blamed = step.report.suspects() if outcome is Outcome.FAILED else []
    history.end(outcome, newest_step(directory, config), blamed)
    if outcome is Outcome.FINISHED:
        return 0
    suspicion = f", first on {', '.join(blamed)}" if blamed else ""
    say(f"{attempt} {outcome.value}{suspicion}; newest checkpoint: step {history.attempts[-1].to_step}")
    if outcome is Outcome.DIVERGED:
        say(
            "loss or gradients diverged on all ranks, and starting again would give the same numbers. Change what the "
            f"message above names, then submit again with RUN_NAME={name}: the run resumes from its newest checkpoint"
        )
    if outcome in FINAL:
        return FINAL[outcome]
    if history.without_progress >= ATTEMPTS_WITHOUT_PROGRESS:
        say(
            f"{ATTEMPTS_WITHOUT_PROGRESS} attempts in a row ended without a newer checkpoint, so this one is the last: starting "
            f"again would end the same way. The cause is above and in {directory.path}/logs/; is checkpoint.interval "
            "longer than a run lives?"
        )
        return ExitCode.BROKE
    return (
        0
        if NextAttempt(job, script, words, name, starts_over=directory.is_starting_over).start(history.excluded)
        else max(code, ExitCode.BROKE)
    )


def _listening(job: Job) -> SrunStep:
    """Create a step that receives this process's signals."""
    step = SrunStep(job)
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, step.on_signal)
    return step


def newest_step(directory: RunDirectory, config: Config) -> int:
    """Return the step of the run's newest checkpoint; 0: there is none."""
    return max(directory.checkpoints(config).steps(), default=0)


def _config(words: Sequence[str], job: Job | None) -> tuple[Config, Path]:
    """Read and check the config; return the config and its path.

    Raises:
        ConfigError: all problems at once, before any task starts.
    """
    asked = request(command_parser(command_module("train")).parse(words))
    path = asked.config_path or default_config(asked.overrides, os.environ)
    rules = [*RULES_OF_A_RUN, *([] if job is None else memory_rules(os.environ))]
    config = load_config(path, asked.overrides, os.environ, more_rules=rules)
    if job is not None:
        ranks_per_node = config.runtime.ranks_per_node or job.tasks_per_node[0]
        require_legal(config, str(path), job.world_size, ranks_per_node, rules)
    return config, path


def _show(root: Path, words: Sequence[str]) -> None:
    """Print what the job would do, on any machine."""
    config, path = _config(words, None)
    here = Job("$SLURM_JOB_ID", 0, ("$SLURM_JOB_NODELIST",), (0,))
    name = run_name(config, path.stem, {"SLURM_JOB_ID": here.number})
    rows = [
        ("run", f"{config.runtime.runs_dir}/{name}/ (logs/attempt_<n>/rank_<r>.log, slurm.json)"),
        ("step", shlex.join(step_words(root, words, os.environ))),
        (
            "stop",
            "SIGUSR1 before the time limit or SIGTERM at a preemption: all ranks finish the step, save and end with "
            f"{ExitCode.REQUEUE}",
        ),
        ("again", f"scontrol requeue {here.number}, until the last step is made"),
        (
            "exclude",
            f"scontrol update JobId={here.number} ExcNodeList=<a node that failed {FAILURES_TO_EXCLUDE} times>",
        ),
        (
            "refused",
            f"RUN_NAME={name} sbatch --dependency=afterany:{here.number} with the same script, resources and words",
        ),
        ("give up", f"after {ATTEMPTS_WITHOUT_PROGRESS} attempts in a row without a newer checkpoint"),
    ]
    for title, text in rows:
        print(f"{title:<9}{text}")


if __name__ == "__main__":
    with standard_streams():
        code = main(sys.argv[1:])
    sys.exit(code)
