"""Parses from srun's messages how tasks ended, and which one ended first.

    srun: error: node2: task 5: Killed                          the first bad end, so node2 is the suspect
    srun: error: node1: tasks 0-3: Exited with exit code 1      tasks that communicated with task 5, a moment later
    srun: Terminating StepId=7.0                                from here on srun itself ends the other tasks
    (no message about tasks 4-7)                                their node is lost, and so is a suspect in any case

Not every site runs SLURM's accounting, which has the same facts.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from triaxis.engine.errors import ExitCode

_TASKS = re.compile(r"srun: error: (?P<nodes>\S+): tasks? (?P<tasks>[\d,-]+): (?P<how>.+)")
_EXITED = re.compile(r"Exited with exit code (\d+)")
_NOT_LAUNCHED = re.compile(r"srun: error: Task launch for \S+ failed on node (\S+?):")
_TERMINATING = re.compile(r"srun: (?:\S+: )*Terminating StepId=(\S+)")
_NODE_FAILED = re.compile(r"srun: error: Node failure on (\S+)", re.IGNORECASE)


@dataclass
class StepReport:
    """The tasks of one SLURM job step, as far as srun has reported them.

    Attributes:
        nodes: node names in task order.
        tasks_per_node: task counts in the same order; tasks are numbered node by node.
        exit_codes: nonzero exit codes of tasks that ended by themselves, by task.
        ended: all tasks that srun has reported as ended badly.
        first: those of them in srun's first such message.
        step: identifier of the step that srun ends, for `scancel`; "" until then.
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

    def has_code(self, code: ExitCode) -> bool:
        """Whether a task ended with this exit code."""
        return code in self.exit_codes.values()

    def read(self, line: str) -> None:
        """Parse one line of srun's standard error."""
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
        """Return the nodes to blame for a task's bad end, once the step is over.

        Lost nodes are blamed: nodes that srun reports as failed, or else nodes without a message about their tasks. If none or
        all are lost, the node in the first message about ended tasks is blamed. A first message about several nodes blames none.
        """
        lost = self._lost or set(self.nodes) - {self.node_of(task) for task in self.ended}
        if lost and lost != set(self.nodes):
            return sorted(lost)
        nodes = {self.node_of(task) for task in self.first}
        return sorted(nodes) if len(nodes) == 1 else []

    def node_of(self, task: int) -> str:
        """Return the node that ran a task."""
        for node, count in zip(self.nodes, self.tasks_per_node, strict=True):
            if task < count:
                return node
            task -= count
        raise IndexError(f"no task {task} past the last one")


def _numbers(text: str) -> list[int]:
    """Parse `"0-2,5"` into `[0, 1, 2, 5]`."""
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers
