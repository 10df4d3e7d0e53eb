"""Where processes meet, and what of their program must be the same in all."""

import re
import socket

import pytest

from jaxpar.hosts.distributed import _check_port, listen_on, program_facts


def test_process_0_listens_where_the_others_look_for_it(monkeypatch):
    assert listen_on("127.0.0.1:1234") == "127.0.0.1:1234"
    assert listen_on("localhost:1234") in ("127.0.0.1:1234", "[::1]:1234")
    assert listen_on("192.0.2.1:1234") is None  # of no machine: reserved for documentation
    assert listen_on("no-such-host.invalid:1234") is None
    # A name that means something else to the others.
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda *_, **__: [(socket.AF_INET, 1, 6, "", ("127.0.1.1", 0))]
    )
    assert listen_on("node1:1234") is None
    # One that does not: the first address that this machine has beside its own.
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda *_, **__: [(socket.AF_INET, 1, 6, "", (own_address(), 0))]
    )
    assert listen_on("node1:1234") == f"{own_address()}:1234"


def own_address():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has no address beside loopback")
        return probe.getsockname()[0]


def test_a_port_in_use_is_named():
    """JAX would share it with who has it."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        for host in ("127.0.0.1", "0.0.0.0"):
            with pytest.raises(OSError, match=rf"Address already in use .*{port}"):
                _check_port(f"{host}:{port}")


def test_the_program_is_its_sources_and_packages():
    facts = program_facts()
    assert re.fullmatch(r"\d+\.\d+\.\d+ \(sources [0-9a-f]{12}\)", facts["jaxpar"])
    assert {"jax", "jaxlib", "flax", "orbax-checkpoint", "jax_enable_x64"} <= facts.keys()


@pytest.mark.parametrize(
    ("flags", "other", "values"),
    [
        (
            "--xla_cpu_enable_fast_math=true --xla_a=1",
            "  --xla_a=1\n --xla_cpu_enable_fast_math ",
            None,
        ),
        ("--xla_dump_to=/a --xla_gpu_dump_llvmir --xla_gpu_cuda_data_dir=/b", "", None),
        (
            "--xla_force_host_platform_device_count=4",
            "--xla_force_host_platform_device_count=2",
            None,
        ),
        ("--xla_a=1 --xla_a=2", "--xla_a=2", None),
        ("", "--xla_a=1", (None, "1")),
        ("--xla_a=2", "--xla_a=1 --xla_dump_to=/a", ("2", "1")),
    ],
)
@pytest.mark.parametrize("variable", ["XLA_FLAGS", "LIBTPU_INIT_ARGS"])
def test_flags_of_the_compiler_are_compared_where_they_change_a_program(
    variable, flags, other, values, monkeypatch
):
    monkeypatch.setenv(variable, flags)
    one = program_facts()
    monkeypatch.setenv(variable, other)
    two = program_facts()
    names = {name for name in one | two if one.get(name) != two.get(name)}
    found = {name: (one.get(name), two.get(name)) for name in names}
    assert found == ({f"{variable} xla_a": values} if values else {})
