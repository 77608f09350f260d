"""The latency hiding scheduler against orders that XLA's has chosen (jaxlib 0.10.2, 8 H100)."""

from __future__ import annotations

from autoshard.cost.compiler.kernels import Kernel
from autoshard.cost.compiler.latency import LOOP, Pressure, Rules, overlapped
from autoshard.cost.compiler.schedule import Reads, dependencies

US = 1e-6


class Program:
    """Kernels in the order in which they run, each with one result that is called as it is."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.kernels: list[Kernel] = []
        self.takes: list[float] = []
        self.moves: list[bool] = []
        self.views: list[bool] = []

    def add(self, name: str, *reads: str, us: float, moves: bool = False, view: bool = False) -> None:
        """One kernel."""
        number = len(self.names)
        operands = tuple(self.names.index(read) for read in reads)
        self.names.append(name)
        self.kernels.append(Kernel((), operands, (number,), "", number))
        self.takes.append(us * US)
        self.moves.append(moves)
        self.views.append(view)

    def places(self, word: str) -> list[int]:
        """Numbers of the kernels whose name begins so."""
        return [number for number, name in enumerate(self.names) if name.startswith(word)]

    def read(self) -> Reads:
        """What the kernels read."""
        return Reads.of_arrays(self.kernels, lambda kernel: self.views[kernel.place])

    def scheduled(self, limit: int | None = None) -> list[str]:
        """Names in the order chosen; a collective's end is called `end of` it.

        Args:
            limit: bytes, where each result has one.
        """
        deps = dependencies(self.kernels)
        reads, makes = [kernel.reads for kernel in self.kernels], [kernel.writes for kernel in self.kernels]
        pressure = None if limit is None else Pressure(limit, reads, makes, dict.fromkeys(range(len(self.names)), 1))
        order = overlapped(range(len(self.names)), deps, self.takes, self.moves, self.read(), pressure=pressure)
        return [f"end of {self.names[number]}" if end else self.names[number] for number, end in order]


def test_gradients_of_kernels_wait_for_those_of_inputs() -> None:
    """Six convolutions, data parallel: each kernel's gradient ran before its input's, and runs behind it."""
    program = Program()
    program.add("g0", us=0.6)
    for layer in range(6):
        program.add(f"kernel{layer}", f"g{layer}", us=10, view=True)
        if layer < 5:
            program.add(f"input{layer}", f"g{layer}", us=10, view=True)
            program.add(f"g{layer + 1}", f"input{layer}", us=0.6)
    program.add("together", *(f"kernel{layer}" for layer in range(6)), us=0.02)
    program.add("sum", "together", us=22, moves=True)
    program.add("update", "sum", us=0.02)
    layers = [name for layer in range(5) for name in (f"g{layer}", f"input{layer}", f"kernel{layer}")]
    assert program.scheduled() == [*layers, "g5", "kernel5", "together", "sum", "end of sum", "update"]


def test_gathers_wait_where_memory_is_short() -> None:
    """Llama 3 70B, 80 layers, on 64 H100: 17.5 GB in sequence, 152 GB as it overlaps, 73 GB as compiled."""
    program = Program()
    program.add("x", us=10)
    for layer in range(4):
        program.add(f"weight{layer}", us=30, moves=True)
        program.add(f"y{layer}", f"weight{layer}", f"y{layer - 1}" if layer else "x", us=10)
    free = program.scheduled()
    assert free[:3] == ["weight0", "end of weight0", "weight1"]
    assert free.index("end of weight1") < free.index("y0")
    later = [name for n in (1, 2, 3) for name in (f"weight{n}", f"end of weight{n}", f"y{n}")]
    assert program.scheduled(2) == ["weight0", "x", "end of weight0", "y0", *later]
    less = program.scheduled(4)
    assert sorted(less) == sorted(free)
    assert less.index("end of weight0") < less.index("x") < less.index("y0") < less.index("end of weight1")
    assert program.scheduled(100) == free


def test_a_cheap_kernel_goes_to_where_something_is_due_soon() -> None:
    """GPT-2 under FSDP: of two padded operands the larger is made first, so that what it is padded from is free."""
    program = Program()
    program.add("table", us=449, moves=True)
    program.add("logits", "table", us=242)
    program.add("padded logits", "logits", us=74, view=True)
    program.add("padded table", "table", us=92, view=True)
    program.add("gradient", "padded logits", "padded table", us=213)
    order = program.scheduled()
    assert order.index("padded table") < order.index("padded logits")


def test_so_many_collectives_of_a_kind_are_in_flight_at_once() -> None:
    """Three gathers for one kernel, two of them at once: the third waits for one of these to start."""
    program = Program()
    for number in range(3):
        program.add(f"gather{number}", us=100, moves=True)
    program.add("reader", "gather0", "gather1", "gather2", us=1)
    deps = dependencies(program.kernels)

    def most(at_once: int) -> int:
        kinds = ["all-gather"] * 3 + [""]
        rules = Rules(at_once={"all-gather": at_once})
        order = overlapped(range(4), deps, program.takes, program.moves, program.read(), kinds, rules)
        flying, found = 0, 0
        for number, end in order:
            flying += 0 if number == 3 else -1 if end else 1
            found = max(found, flying)
        return found

    assert [most(1), most(2), most(5)] == [1, 2, 3]


def test_an_element_with_another_user_makes_nothing_ready() -> None:
    """Of libtpu's log for a ViT: a weight's gradient reads an element that the next gradient reads too."""
    program = Program()
    program.add("gradients", us=10, view=True)
    program.add("of weight", "gradients", us=10)
    program.add("of input", "gradients", us=10)
    program.add("reduced", "of weight", us=1)
    program.add("before", us=1)
    program.add("other", "before", us=10)
    assert program.scheduled().index("of weight") < program.scheduled().index("before")


def test_a_loop_waits_while_permutes_are_in_flight() -> None:
    """As libtpu schedules loops of weight gradients on v5p: permutes of three fly, so those of the others come last."""
    program = Program()
    program.add("g0", us=10)
    for layer in range(8):
        program.add(f"loop{layer}", f"g{layer}", us=20)
        program.add(f"permute{layer}", f"loop{layer}", us=0.4, moves=True)
        program.add(f"g{layer + 1}", f"g{layer}", us=10)
    for layer in range(8):
        program.add(f"update{layer}", f"permute{layer}", us=0.3)
    kinds = [
        LOOP if name.startswith("loop") else "collective-permute" if name.startswith("permute") else ""
        for name in program.names
    ]
    rules = Rules(at_once={"collective-permute": 5}, aggressive=False)
    deps = dependencies(program.kernels)
    order = overlapped(range(len(program.names)), deps, program.takes, program.moves, program.read(), kinds, rules)
    found = [program.names[number] for number, end in order if not end]
    flying = {number for number in range(8) if found.index(f"loop{number}") < found.index("g7")}
    assert 0 < len(flying) <= 3
    assert sorted(number for number, _ in order) == sorted([*range(len(program.names)), *program.places("permute")])
