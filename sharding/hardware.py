"""What a TPU chip can do, and the least time that a program can take on it.

One chip, by Google's documentation (docs.cloud.google.com/tpu/docs: pages v4, v5e, v5p, v6e, tpu7x;
read in 2026):

| | v4 | v5e | v5p | v6e | tpu7x |
|---|---|---|---|---|---|
| peak bf16, TFLOP/s | 275 | 197 | 459 | 918 | 2307 |
| HBM, GiB | 32 | 16 | 95 | 32 | 192 |
| HBM, GB/s | 1200 | 819 | 2765 | 1638 | 7380 |
| ICI, both directions together, GB/s | 600 | 400 | 1200 | 800 | 1200 |
| ICI torus | 3D | 2D | 3D | 2D | 3D |
| data center network, Gb/s | ? | 25 | 50 | 100 | 100 |

v4's page gives no ICI figure: 600 GB/s is six links of 50 GB/s each way (Jouppi et al., "TPU v4: an
optically reconfigurable supercomputer", 2023). v5e's network is its page's 6.4
Tb/s a pod of 256 chips. Memory is what is built in; the compiler keeps a little for itself (it
grants 15.75 GiB of a v5e's 16) and refuses a program that needs more.

**The roofline.** Four clocks run beside each other, and the longest is the estimate:

- arithmetic: FLOPs of the program ÷ peak,
- memory: bytes that the program moves ÷ HBM bandwidth,
- ICI: Σ over collectives of the bytes that a chip receives ÷ the bandwidth, one way, of the torus
  axes that the collective's devices spread over,
- network: the same for collectives that join slices ÷ the network's bandwidth.

So it is a bound: no chip reaches its peak, links of a small slice do not wrap around, and not all
communication hides behind arithmetic. The sum of the four is the other end, where nothing overlaps.
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
      bandwidth: bytes a second between memory and chip.
      ici: bytes a second of all links between chips, both directions together.
      torus: dimensions of the torus that the links make.
      network: bytes a second between slices; None where it is not documented.
    """

    name: str
    flops: float
    hbm: int
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
            bandwidth=self.bandwidth / parts,
            ici=self.ici / parts,
            network=self.network and self.network / parts,
        )


def _chip(
    name: str, tflops: float, hbm: int, bandwidth: float, ici: float, torus: int, gbits: float
) -> Chip:
    return Chip(
        name=name,
        flops=tflops * 1e12,
        hbm=hbm * GIB,
        bandwidth=bandwidth * 1e9,
        ici=ici * 1e9,
        torus=torus,
        network=gbits * 1e9 / 8 if gbits else None,
    )


CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        _chip("v4", 275, 32, 1200, 600, 3, 0),
        _chip("v5e", 197, 16, 819, 400, 2, 25),
        _chip("v5p", 459, 95, 2765, 1200, 3, 50),
        _chip("v6e", 918, 32, 1638, 800, 2, 100),
        _chip("tpu7x", 2307, 192, 7380, 1200, 3, 100),
    )
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clocks:
    """Seconds that each part of the machine needs for a program.

    >>> clocks = Clocks(arithmetic=2.0, memory=0.5, ici=1.0, network=0.0)
    >>> clocks.longest, clocks.bound_by, clocks.together
    (2.0, 'arithmetic', 3.5)
    """

    arithmetic: float
    memory: float
    ici: float
    network: float

    @property
    def longest(self) -> float:
        """The estimate: everything else happens meanwhile."""
        return max(dataclasses.astuple(self))

    @property
    def together(self) -> float:
        """Where nothing overlaps."""
        return sum(dataclasses.astuple(self))

    @property
    def bound_by(self) -> str:
        """What takes longest."""
        parts = dataclasses.asdict(self)
        return max(parts, key=lambda name: parts[name])


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
