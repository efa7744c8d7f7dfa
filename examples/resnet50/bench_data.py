"""Measure how many images per second one core decodes and augments.

    python -m examples.resnet50.bench_data
    python -m examples.resnet50.bench_data --data /data/imagenet --json

Without data, it makes JPEGs of ImageNet's typical size: 500x375, about 100 kB.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from rich.console import Console
from rich.progress import Progress

from examples.resnet50.data import Batches
from examples.resnet50.images import Images, open_images
from ftmesh.command_line import Parser, number, whole_number

Tick = Callable[[float], None]


@dataclass(frozen=True)
class Rates:
    """Images per second of one core's time."""

    train: float  # random crops
    evaluation: float  # centre crops


class SyntheticJpegs:
    """JPEGs with large shapes and fine grain, as photographs have."""

    def __init__(self, num_images: int = 16, width: int = 500, height: int = 375) -> None:
        rng = np.random.default_rng(0)
        self._files = []
        for _ in range(num_images):
            shapes = Image.fromarray(rng.integers(0, 256, (12, 16, 3), np.uint8))
            pixels = np.asarray(shapes.resize((width, height), Image.Resampling.BICUBIC), np.int16)
            pixels = pixels + rng.normal(0, 20, pixels.shape).astype(np.int16)
            file = io.BytesIO()
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
            self._files.append(file.getvalue())

    def __len__(self) -> int:
        return len(self._files)

    def name(self, index: int) -> str:
        """Name an image in messages."""
        return f"synthetic JPEG {index}"

    def read(self, index: int) -> tuple[bytes | NDArray[np.uint8], int]:
        """Return a JPEG and a label, which does not matter."""
        return self._files[index], 0


def measure_decoding(
    data: str | None = None,
    *,
    size: int = 224,
    seconds: float = 3,
    num_classes: int = 1000,
    progress: Tick = lambda seconds: None,
) -> Rates:
    """Decode on one core for `seconds`, with random and with centre crops.

    `progress` is called with the seconds passed since the last call.
    """
    rates = []
    for split, num_steps in (("train", 2**40), ("validation", None)):
        images: Images = SyntheticJpegs()
        if data is not None:
            images = open_images(data, split, size=size, num_classes=num_classes, num_images=0)
        batches = Batches(images, size=size, batch=1, num_steps=num_steps)
        batches[0]
        done, start = 0, time.process_time()
        while (spent := time.process_time() - start) < seconds:
            for _ in range(8):
                batches[done % len(batches)]
                done += 1
            progress(time.process_time() - start - spent)
        rates.append(done / spent)
    return Rates(*rates)


def main() -> None:
    """Parse the arguments, measure and print."""
    parser = Parser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", help="a folder of TFRecords or of image folders")
    parser.add_argument(
        "--size", type=whole_number(1, 4096), default=224, help="side of the crops (default: 224)"
    )
    parser.add_argument(
        "--seconds", type=number(0.1), default=3.0, help="per kind of crop (default: 3)"
    )
    parser.add_argument("--json", action="store_true", help="print the rates as JSON")
    args = parser.parse_args()
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("decoding", total=2 * args.seconds)
        rates = measure_decoding(
            args.data,
            size=args.size,
            seconds=args.seconds,
            progress=lambda seconds: bar.advance(task, seconds),
        )
    if args.json:
        print(json.dumps(asdict(rates)))
    else:
        print(
            f"train: {rates.train:.0f} images/s per core, random crops of {args.size}x{args.size}"
        )
        print(f"evaluation: {rates.evaluation:.0f} images/s per core, centre crops")


if __name__ == "__main__":
    main()
