"""What a TPU chip can do, and the least time that a program can take on it.

One chip, by Google's documentation (docs.cloud.google.com/tpu/docs: pages v4, v5e, v5p, v6e, tpu7x;
read in 2026):

| | v4 | v5e | v5p | v6e | tpu7x |
|---|---|---|---|---|---|
| peak bf16, TFLOP/s | 275 | 197 | 459 | 918 | 2307 |
| HBM, GiB | 32 | 16 | 95 | 32 | 192 |
| granted by the compiler, GiB | 30.5 | 15.75 | 95.7 | 31.2 | 189.4 |
| HBM, GB/s | 1200 | 819 | 2765 | 1638 | 7380 |
| ICI, both directions together, GB/s | 600 | 400 | 1200 | 800 | 1200 |
| ICI torus | 3D | 2D | 3D | 2D | 3D |
| data center network, Gb/s | ? | 25 | 50 | 100 | 100 |

v4's page gives no ICI figure: 600 GB/s is six links of 50 GB/s each way (Jouppi et al., "TPU v4: an
optically reconfigurable supercomputer", 2023). v5e's network is its page's 6.4 Tb/s a pod of 256
chips. HBM is what the pages say is built in. What the compiler grants of it, and so what fits,
follows from its refusals (libtpu 0.0.52; both halves of a v4 and tpu7x together).

**The roofline.** Four clocks run beside each other, and the longest is the estimate:

- arithmetic: FLOPs of the program ÷ peak,
- memory: bytes that the program moves ÷ HBM bandwidth,
- ICI: Σ over collectives of the bytes that a chip receives ÷ the bandwidth, one way, of the torus
  axes that the collective's devices spread over,
- network: the same for collectives that join slices ÷ the network's bandwidth.

So it is an estimate, a bound on neither side. It is low because no chip reaches its peak, links of
a small slice do not wrap around, and not all communication hides behind arithmetic. It can be high
because two collectives on different torus axes, which may run at once, count one after the other.
The sum of the four is the time where nothing overlaps. A clock that is not known (the network's
bandwidth is not documented) is left out of both.
"""

from __future__ import annotations

import dataclasses

__all__ = ["CHIPS", "Chip", "Clocks", "chip_of"]

GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """One chip.

    Args:
      name: as topologies spell it.
      flops: bf16 operations a second at peak.
      hbm: bytes of memory.
      granted: bytes that the compiler grants to programs.
      bandwidth: bytes a second between memory and chip.
      ici: bytes a second of all links between chips, both directions together.
      torus: dimensions of the torus that the links make.
      network: bytes a second between slices; None where it is not documented.
    """

    name: str
    flops: float
    hbm: int
    granted: int
    bandwidth: float
    ici: float
    torus: int
    network: float | None

    def split(self, parts: int) -> Chip:
        """One of the devices that jax sees in a chip (two in v4 and tpu7x).

        >>> CHIPS["v4"].split(2).hbm // 2**30
        16
        """
        return dataclasses.replace(
            self,
            flops=self.flops / parts,
            hbm=self.hbm // parts,
            granted=self.granted // parts,
            bandwidth=self.bandwidth / parts,
            ici=self.ici / parts,
            network=self.network and self.network / parts,
        )


def _chip(*given: float, name: str, torus: int, gbits: float | None) -> Chip:
    tflops, hbm, granted, bandwidth, ici = given
    return Chip(
        name=name,
        flops=tflops * 1e12,
        hbm=int(hbm * GIB),
        granted=int(granted * GIB),
        bandwidth=bandwidth * 1e9,
        ici=ici * 1e9,
        torus=torus,
        network=None if gbits is None else gbits * 1e9 / 8,
    )


CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        _chip(275, 32, 30.5, 1200, 600, name="v4", torus=3, gbits=None),
        _chip(197, 16, 15.75, 819, 400, name="v5e", torus=2, gbits=25),
        _chip(459, 95, 95.7, 2765, 1200, name="v5p", torus=3, gbits=50),
        _chip(918, 32, 31.2, 1638, 800, name="v6e", torus=2, gbits=100),
        _chip(2307, 192, 189.4, 7380, 1200, name="tpu7x", torus=3, gbits=100),
    )
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clocks:
    """Seconds that each part of the machine needs for a program; None where that is not known.

    >>> clocks = Clocks(arithmetic=2.0, memory=0.5, ici=1.0, network=0.0)
    >>> clocks.longest, clocks.bound_by, clocks.together
    (2.0, 'arithmetic', 3.5)
    """

    arithmetic: float
    memory: float
    ici: float
    network: float | None

    @property
    def _known(self) -> dict[str, float]:
        parts = dataclasses.asdict(self)
        return {name: seconds for name, seconds in parts.items() if seconds is not None}

    @property
    def longest(self) -> float:
        """The estimate: everything else happens meanwhile."""
        return max(self._known.values())

    @property
    def together(self) -> float:
        """Where nothing overlaps."""
        return sum(self._known.values())

    @property
    def bound_by(self) -> str:
        """What takes longest."""
        return max(self._known, key=lambda name: self._known[name])


def chip_of(topology: str) -> Chip | None:
    """The chip that a topology such as ``v5e:16x16`` is made of.

    Args:
      topology: chip, colon, shape.

    Returns:
      Its figures; None for ``cpu:8``, of which nothing is known.

    Raises:
      ValueError: for a chip that is not in the table.

    >>> chip_of("v5e:16x16").hbm // 2**30, chip_of("cpu:8")
    (16, None)
    """
    name = topology.partition(":")[0]
    if name == "cpu":
        return None
    if name not in CHIPS:
        raise ValueError(
            f"topology: unknown chip {name!r} in {topology!r}; known: {', '.join(CHIPS)}, cpu "
            "(e.g. v5e:16x16, v5p:4x4x4, cpu:8)"
        )
    return CHIPS[name]
