"""Which numbers of rows a device computes alike: all, on the device that the CPU serves."""

import sys

import pytest
from native_programs import passes


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform == "win32", reason="as on Linux and macOS")
def test_every_width_is_computed_alike(programs):
    """native/tests/widths_test prints the classes of any device: here there must be one."""
    import rpc_device

    served = rpc_device.Device()  # its process is this program, not the tests'
    # the RPC backend's buffer types live as long as the process
    passes(programs, "widths_test", 512, 32, rpc_device.built(), served.endpoint, leaks=False)
    served.end()
