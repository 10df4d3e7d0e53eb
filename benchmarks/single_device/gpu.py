"""The training step on a GPU, against that of PyTorch, whose LSTM is cuDNN's.

    python -m benchmarks.single_device.gpu C D --numbers tf32 bfloat16 --torch-python venv/bin/python

jaxpar runs twice, with its loop over time and with its kernels (`fused`), but for float32, which has none.

tf32: float32 whose matmuls round to TF32, what both do by themselves (PyTorch in its LSTM, here in its head
as well). float32: they do not. bfloat16: jaxpar with float32 parameters; PyTorch likewise, by its autocast,
and with parameters of bfloat16.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys

from benchmarks.sides import Side, measure, table
from benchmarks.work import WORKS

GPU = (("JAX_PLATFORMS", "cuda"), ("XLA_PYTHON_CLIENT_PREALLOCATE", "false"))
NUMBERS = ("tf32", "float32", "bfloat16")
PROBES = {
    "JAX": "import jax; device, = jax.devices('cuda')[:1]; "
    "print(device.device_kind, 'jax', jax.__version__, device.client.platform_version)",
    "PyTorch": "import torch; print(torch.cuda.get_device_name(), 'torch', torch.__version__, "
    "'CUDA', torch.version.cuda, 'cuDNN', torch.backends.cudnn.version())",
}


def sides_of(work: str, numbers: str, torch_python: str | None, xla_flags: str = "") -> list[Side]:
    """All sides; the first is what the others are held against.

    Args:
      xla_flags: of one more side.
    """
    cores = (tuple(os.sched_getaffinity(0)),)
    env = GPU + ((("JAX_DEFAULT_MATMUL_PRECISION", "highest"),) if numbers == "float32" else ())

    def torch_side(numbers: str) -> Side:
        arguments = ("-m", "benchmarks.single_device.torch_side", work, "cuda", numbers)
        return Side(f"torch.nn.LSTM, {numbers}", arguments, cores, torch_python or "")

    def jaxpar_side(flags: str = "", *, fused: bool = False) -> Side:
        options = {"dtype": "bfloat16" if numbers == "bfloat16" else "float32", "fused": fused}
        settings = ('{"devices": [0]}', "{}", json.dumps(options))
        arguments = ("-m", "benchmarks.jaxpar_side", work, *settings)
        name = ", ".join(["jaxpar", numbers, *["fused"] * fused, *flags.split()])
        flagged = (("XLA_FLAGS", flags),) if flags else ()
        return Side(name, arguments, cores, env=env + flagged)

    of_torch = ["autocast", "bfloat16"] if numbers == "bfloat16" else [numbers]
    return [
        *(map(torch_side, of_torch) if torch_python else ()),
        jaxpar_side(),
        *([jaxpar_side(fused=True)] if numbers != "float32" else []),
        *([jaxpar_side(xla_flags)] if xla_flags else []),
    ]


def main() -> None:
    """Prints the table; says so and ends with code 2 where there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("works", nargs="+", choices=WORKS)
    parser.add_argument("--numbers", nargs="+", choices=NUMBERS, default=NUMBERS[:1])
    parser.add_argument("--xla-flags", default="", help="of one more side")
    parser.add_argument("--torch-python", help="of an environment with torch for CUDA, and numpy")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=10, help="of a round")
    args = parser.parse_args()
    if min(args.rounds, args.steps) < 2:
        parser.error(f"--rounds {args.rounds} --steps {args.steps}: use 2 or more")
    pythons = {"JAX": sys.executable, "PyTorch": args.torch_python}
    for name, python in pythons.items():
        if python is None:
            continue
        try:
            print(_probe(python, PROBES[name]))
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", None) or str(error)
            parser.error(
                f"{name} of {python} finds no GPU ({said.strip().splitlines()[-1]}); run this where there is "
                f"one, with {name} for CUDA"
            )
    for work, numbers in itertools.product(args.works, args.numbers):
        print(f"work {work}, {numbers}: {WORKS[work]}\n")
        sides = sides_of(work, numbers, args.torch_python, args.xla_flags)
        results = measure(sides, num_rounds=args.rounds, num_steps=args.steps)
        print(table(results, WORKS[work].tokens), "\n")
        peaks = (f"{result.side.name} {result.about['peak_mib']:.0f}" for result in results)
        print(f"Peak memory on the GPU, MiB: {'; '.join(peaks)}\n", flush=True)


def _probe(python: str, code: str) -> str:
    done = subprocess.run(
        [python, "-c", code], capture_output=True, text=True, check=True, env=os.environ | dict(GPU)
    )
    return done.stdout.strip()


if __name__ == "__main__":
    main()
