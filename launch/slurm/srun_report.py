"""What srun says about its tasks, read from its messages: who ended how, who first, who never (no torch here).

    srun: error: node2: task 5: Killed                          the first word about a bad end: its node is the suspect
    srun: error: node1: tasks 0-3: Exited with exit code 1      those that were talking to it, a moment later
    srun: Terminating StepId=7.0                                from here on the others die by srun's own hand
    (no word about tasks 4-7)                                   their node is lost: it is the suspect, whatever came first

SLURM's accounting would know the same, where a site has it and a compute node may ask it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.errors import ExitCode

_TASKS = re.compile(r"srun: error: (?P<nodes>\S+): tasks? (?P<tasks>[\d,-]+): (?P<how>.+)")
_EXITED = re.compile(r"Exited with exit code (\d+)")
_NOT_LAUNCHED = re.compile(r"srun: error: Task launch for \S+ failed on node (\S+?):")
_TERMINATING = re.compile(r"srun: (?:\S+: )*Terminating StepId=(\S+)")
_NODE_FAILED = re.compile(r"srun: error: Node failure on (\S+)", re.IGNORECASE)


@dataclass
class StepReport:
    """What is known of the tasks of one step, line by line.

    Attributes:
        nodes: names in the order of the tasks.
        tasks_per_node: in the same order; tasks are numbered node by node.
        exit_codes: of tasks that ended by themselves with a code that is not 0.
        ended: tasks that srun has spoken of.
        first: tasks of the first bad end.
        step: number of the step that srun ends, for `scancel`; "" before it does.
    """

    nodes: Sequence[str]
    tasks_per_node: Sequence[int]
    exit_codes: dict[int, int] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    first: tuple[int, ...] = ()
    step: str = ""
    _lost: set[str] = field(default_factory=set)

    @property
    def is_bad(self) -> bool:
        """Whether a task ended badly, or could not be started."""
        return bool(self.ended or self._lost)

    @property
    def was_preempted(self) -> bool:
        """No rank ends with the requeue code before all have agreed and saved: one is enough."""
        return ExitCode.REQUEUE in self.exit_codes.values()

    @property
    def was_interrupted(self) -> bool:
        return ExitCode.INTERRUPTED in self.exit_codes.values()

    @property
    def was_mistaken(self) -> bool:
        return ExitCode.MISTAKE in self.exit_codes.values()

    @property
    def has_diverged(self) -> bool:
        """All ranks come to it after the same step: one is enough."""
        return ExitCode.DIVERGED in self.exit_codes.values()

    def read(self, line: str) -> None:
        """One line of srun's standard error; most of them say nothing about tasks."""
        if match := _TASKS.match(line):
            tasks = _numbers(match["tasks"])
            self.first = self.first or tuple(tasks)
            self.ended.update(tasks)
            if exited := _EXITED.match(match["how"]):
                self.exit_codes.update(dict.fromkeys(tasks, int(exited[1])))
        elif match := _TERMINATING.match(line):
            self.step = match[1]
        elif match := _NOT_LAUNCHED.match(line) or _NODE_FAILED.match(line):
            self._lost.add(match[1].rstrip(".,:"))

    def suspects(self) -> list[str]:
        """Nodes to blame for a bad end, once the step is over: those that are lost, else the node of the first bad end.

        A node of whose tasks no word was heard, though srun has ended all of them, does not answer. Where the first word is about
        several nodes at once, none of them is to blame.
        """
        lost = self._lost or set(self.nodes) - {self.node_of(task) for task in self.ended}
        if lost and lost != set(self.nodes):
            return sorted(lost)
        nodes = {self.node_of(task) for task in self.first}
        return sorted(nodes) if len(nodes) == 1 else []

    def node_of(self, task: int) -> str:
        """The node that ran a task."""
        for node, count in zip(self.nodes, self.tasks_per_node, strict=True):
            if task < count:
                return node
            task -= count
        raise IndexError(f"no task {task} past the last one")


def _numbers(text: str) -> list[int]:
    """`"0-2,5"` -> `[0, 1, 2, 5]`."""
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers
