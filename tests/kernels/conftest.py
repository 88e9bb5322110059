"""Where tests of Triton kernels run: in the interpreter on CPU tensors, or compiled on a GPU.

    def test_op(triton_device: torch.device) -> None:
        x = torch.randn(3, 5, device=triton_device)
        assert_close(op(x), op_reference(x))

`triton_device` runs a test twice. As [interpreter], op's dispatcher sends CPU tensors to the Triton version
(kernels.cuda.cpu_tensors_too); skipped where kernels are compiled. As [cuda], marked `gpu`, on the GPU. One
process does one of both, since triton decides when it is imported: tests/conftest.py sets TRITON_INTERPRET=1
before that on a machine without a GPU, and on one with a GPU the user may (TRITON_INTERPRET=1 pytest
tests/kernels). To compare with the op's torch version on CPU tensors, call the reference by its name, or take
the expected values on float64 tensors, which never go to Triton.

Dtypes: the interpreter cuts float32 to bfloat16 where the device rounds to the nearest even. Here it is made
to round too, so bfloat16 results may be compared as strictly as on the device.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from interpreted import as_the_device

from kernels import cuda


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def triton_device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The device for a kernel test's tensors; see the module's docstring."""
    if not cuda.available():
        pytest.skip("triton is not installed")
    if request.param == "cuda":
        if cuda.interpreting():
            pytest.skip("TRITON_INTERPRET is on: kernels run in the interpreter")
        yield torch.device("cuda", torch.cuda.current_device())
        return
    if not cuda.interpreting():
        pytest.skip("kernels are compiled in this process; TRITON_INTERPRET=1 runs them in the interpreter")
    as_the_device()
    # Overflow and 0 * inf have their IEEE results on the device, without a word.
    with np.errstate(all="ignore"), cuda.cpu_tensors_too():
        yield torch.device("cpu")
