"""`python -m davincirunsdk.demo`: one worker of the demo training."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from davincirunsdk.demo.place import DemoError, Place, read_place

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from davincirunsdk.demo.training import Backend

EXTRAS = {"numpy": "demo", "sklearn": "demo", "torch": "torch", "mindspore": "mindspore"}
"""Which extra of this package brings the package that must be imported."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one worker.

    Args:
        arguments: Command line without the program's name; the process's own if None.

    Returns:
        Exit code: 0 trained, 1 could not.
    """
    options = _parser().parse_args(arguments)
    try:
        if os.environ.get("MS_ROLE") == "MS_SCHED":
            _serve_as_scheduler(options)
        else:
            _work(options, read_place(os.environ))
    except DemoError as error:
        return _give_up(str(error))
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        return _give_up(_missing(error.name))
    return 0


def _serve_as_scheduler(options: argparse.Namespace) -> None:
    if options.backend != "mindspore":
        raise DemoError(
            f"--backend {options.backend} has no use for MindSpore's scheduler: "
            "leave out --framework mindspore, or choose --backend mindspore"
        )
    from davincirunsdk.demo.mindspore_backend import serve_as_scheduler

    serve_as_scheduler()


def _work(options: argparse.Namespace, place: Place) -> None:
    if options.fail is not None and options.fail >= place.world_size:
        raise DemoError(f"--fail {options.fail}: this job has ranks 0 to {place.world_size - 1}")
    # Imported late, for it needs packages which only the extras bring.
    from davincirunsdk.demo.training import train

    backend = _backend(options.backend, place, options.seed)
    train(backend, place, epochs=options.epochs, seed=options.seed, fail=options.fail)
    backend.close()


def _backend(name: str, place: Place, seed: int) -> Backend:
    if name == "torch":
        from davincirunsdk.demo.torch_backend import TorchBackend

        return TorchBackend(place, seed)
    if name == "mindspore":
        from davincirunsdk.demo.mindspore_backend import MindSporeBackend

        return MindSporeBackend(place, seed)
    from davincirunsdk.demo.numpy_backend import NumpyBackend

    return NumpyBackend(place, seed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m davincirunsdk.demo",
        description="Data-parallel training on handwritten digits. "
        "Four workers: davincirun --nproc-per-node 4 -m davincirunsdk.demo",
    )
    parser.add_argument("--backend", choices=("numpy", "torch", "mindspore"), default="numpy")
    parser.add_argument("--fail", type=_from(0), metavar="RANK", help="this rank breaks in the middle")
    parser.add_argument("--epochs", type=_from(1), default=20, help="times through the images (default: 20)")
    parser.add_argument("--seed", type=_from(0), default=0, help="decides weights and order (default: 0)")
    return parser


def _from(lowest: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not (text.isascii() and text.isdigit() and int(text) >= lowest):
            raise argparse.ArgumentTypeError(f"found {text!r}, expected a whole number from {lowest} on")
        return int(text)

    return number


def _missing(package: str) -> str:
    message = f"the demo needs the package {package!r}: pip install 'davincirunsdk[{EXTRAS[package]}]'"
    if package == "mindspore" and sys.version_info >= (3, 13):
        message += " (with Python 3.12 or older: MindSpore is not made for newer ones)"
    return message


def _give_up(reason: str) -> int:
    sys.stderr.write(f"davincirunsdk.demo: {reason}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
