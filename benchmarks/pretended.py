"""A GPU that is not there: torch.compile's code for it, made on any machine and never run.

    pretend('h200')                                        # for good: this process has no other use then
    forward, backward = generate(function, parameters, inputs)

Inductor's own passes, partitioner, scheduler and Triton code generation do the work. What they ask of a
device is answered here, and the code is kept where it would be built. That takes private doors of torch and
of Triton, so the versions are stated, and others refused.
"""
import collections
import contextlib
import functools
import re
import types
from typing import NamedTuple

import torch
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_leaves

from configurator import MachineError, SettingError

TORCH, TRITON = ((2, 11), (2, 14)), ((3, 6), (3, 8))    # from, to before

GPUS = {  # name -> (as torch calls it, compute capability, streaming multiprocessors); shared memory below
    'h200': ('NVIDIA H200', (9, 0), 132),
    'b200': ('NVIDIA B200', (10, 0), 148),
}
SHARED_MEMORY = 232_448     # bytes a block may take, of both


class Call(NamedTuple):
    """A call of the generated code. kind: 'triton', Inductor's or one of fp8_kernels/, or 'library'. bytes:
    read and written, by Inductor's count, or of arguments and results; None for a library's."""
    kind: str
    name: str
    bytes: float | None


class Generated(NamedTuple):
    """The code of one graph, forward or backward, and its calls in their order."""
    source: str
    calls: list


def check_versions():
    """Raises MachineError where the doors may be elsewhere."""
    try:
        import triton
    except ImportError:
        raise MachineError('Inductor\'s code for a GPU wants Triton, without a GPU too: '
                           'pip install --no-deps "triton>=3.6,<3.8"') from None
    for module, (first, end) in ((torch, TORCH), (triton, TRITON)):
        found = tuple(int(part) for part in module.__version__.split('.')[:2])
        if not first <= found < end:
            raise MachineError(f'code for a pretended GPU wants torch 2.11 to 2.13 and Triton 3.6 or 3.7, '
                               f'not {module.__name__} {module.__version__}')


# ------------------------------------------------------------------------------------------------- pretending

def nothing(*arguments, **kwargs):
    pass


@contextlib.contextmanager
def no_device(*arguments):
    yield


def pretend(name):
    """Answers for a GPU of GPUS whoever asks torch.cuda, Inductor or Triton. Raises SettingError for another
    name, MachineError for versions that are not known."""
    check_versions()
    if name not in GPUS:
        raise SettingError(f'gpu is {" or ".join(GPUS)}, not {name!r}')
    title, (major, minor), multiprocessors = GPUS[name]
    properties = types.SimpleNamespace(
        name=title, major=major, minor=minor, multi_processor_count=multiprocessors, total_memory=150 << 30,
        regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
        warp_size=32, shared_memory_per_block_optin=SHARED_MEMORY,
        shared_memory_per_multiprocessor=SHARED_MEMORY + 1024, L2_cache_size=50 << 20,
        gcnArchName='', uuid='0', pci_bus_id=0)
    answers = {
        'is_available': lambda: True,
        'device_count': lambda: 1,
        'current_device': lambda: 0,
        'get_device_properties': lambda *device: properties,
        'get_device_capability': lambda *device: (major, minor),
        'get_device_name': lambda *device: title,
        'is_bf16_supported': lambda *arguments, **kwargs: True,
        'memory_allocated': lambda *device: 0,
        'get_rng_state': lambda *device: torch.zeros(16, dtype=torch.uint8),
        'set_rng_state': nothing,
        'set_device': nothing, 'synchronize': nothing, '_lazy_init': nothing,
        'device': no_device, '_DeviceGuard': no_device,
    }
    torch._C._ensureCUDADeviceGuardSet()
    ops = torch.ops.aten  # these three methods of theirs ask a CPU build for the device
    for name, op in (('__invert__', ops.bitwise_not), ('copy_', ops.copy_), ('contiguous', ops.contiguous)):
        setattr(torch.Tensor, name, functools.partialmethod(lambda x, *a, op, **k: op(x, *a, **k), op=op))
    pretend_to_inductor(properties, answers)
    for question, answer in answers.items():
        setattr(torch.cuda, question, answer)
    pretend_to_triton(major * 10 + minor, multiprocessors)


def pretend_to_inductor(properties, answers):
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.fx_passes import joint_graph, post_grad
    from torch._subclasses import fake_tensor
    for passes in (joint_graph, post_grad):  # their patterns are traced while there is no CUDA yet
        passes.lazy_init(torch.device('cpu'))
        passes.lazy_init = nothing
    fake_tensor.init_gpu_context = nothing
    for question in ('is_available', 'device_count', 'current_device', 'is_bf16_supported',
                     'get_device_properties', 'synchronize'):
        setattr(CudaInterface, question, staticmethod(answers[question]))
    CudaInterface.device = no_device
    CudaInterface.Worker.get_device_properties = staticmethod(lambda *device: properties)
    CudaInterface.Worker.current_device = staticmethod(lambda: 0)


def pretend_to_triton(capability, multiprocessors):
    import triton
    from triton.backends.compiler import GPUTarget

    class Driver:
        utils = types.SimpleNamespace(get_device_properties=lambda device: {
            'max_shared_mem': SHARED_MEMORY, 'multiprocessor_count': multiprocessors})

        def get_current_target(self):
            return GPUTarget('cuda', capability, 32)

        def get_active_torch_device(self):
            return torch.device('cuda', 0)

        def __getattr__(self, name):  # current device, stream, ...
            return lambda *arguments, **kwargs: 0

    triton.runtime.driver.set_active(Driver())


# ------------------------------------------------------------------------------------------------- generating

class Done(Exception):
    """What is wanted is there; the rest would run it."""


def generate(function, parameters, inputs):
    """[forward, backward], Generated, of function(parameters, inputs) -> a tensor or several, as
    torch.compile splits and compiles it. parameters, inputs: lists of fake tensors on the CPU."""
    return [code_of(graph, example, number) for number, (graph, example)
            in enumerate(split(function, parameters, inputs))]


def split(function, parameters, inputs):
    """[(graph, example inputs)] of forward and backward, by Inductor's passes and partitioner."""
    from torch._functorch.aot_autograd import aot_function
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor import compile_fx
    from torch._inductor.decomposition import select_decomp_table
    graphs, n = [], len(parameters)
    parameters_come_first = list(range(n))

    def partition(joint, joint_inputs, *, static_lifetime_input_indices=None, **options):
        compile_fx._recursive_joint_graph_passes(joint)
        graphs.extend(min_cut_rematerialization_partition(
            joint, joint_inputs, compiler='inductor',
            static_lifetime_input_indices=parameters_come_first, **options))
        raise Done

    traced = aot_function(
        lambda *flat: function(flat[:n], flat[n:]), fw_compiler=None, partition_fn=partition,
        decompositions=select_decomp_table(), num_params_buffers=n, keep_inference_input_mutations=True)
    with contextlib.suppress(Done):
        traced(*parameters, *inputs)
    return [(graph, [node.meta['val'] for node in graph.graph.nodes if node.op == 'placeholder'])
            for graph in graphs]


def on_cuda(graph, example):
    """The graph and its example inputs with every tensor on the GPU."""
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp
    gpu = torch.device('cuda', 0)

    def moved(value):
        return gpu if isinstance(value, torch.device) else value

    for node in graph.graph.nodes:
        node.args = tuple(moved(value) for value in node.args)
        node.kwargs = {name: moved(value) for name, value in node.kwargs.items()}
    graph.recompile()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        example = [torch.empty_strided(e.shape, e.stride(), dtype=e.dtype, device=gpu)
                   if isinstance(e, torch.Tensor) else e for e in example]
        FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*example)
    return graph, example


def code_of(graph, example, backward):
    """The Generated of one graph of `split`; backward: 0 or 1."""
    import torch._inductor.config as settings
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.graph import GraphLowering
    sources, build = [], GraphLowering.compile_to_module

    def keep(self):
        code, _ = self.codegen()
        sources.append(getattr(code, 'value', code))
        raise Done

    graph, example = on_cuda(graph, example)
    GraphLowering.compile_to_module = keep
    try:  # benchmark_kernel writes each kernel's bytes beside it
        with settings.patch(fx_graph_cache=False, compile_threads=1, benchmark_kernel=True):
            compile_fx_inner(
                graph, example, static_input_idxs=[], is_backward=bool(backward), cudagraphs=False)
    except Exception:
        if not sources:
            raise
    finally:
        GraphLowering.compile_to_module = build
    return Generated(sources[0], list(calls(sources[0], own_kernels(graph))))


def own_kernels(graph):
    """Name -> [bytes of its arguments and results] of the calls of fp8_kernels/ in a graph."""
    found = collections.defaultdict(list)
    for node in graph.graph.nodes:
        if str(node.target).startswith('fp8_kernels.'):
            tensors = tree_leaves([node.meta['val'], *(n.meta['val'] for n in node.all_input_nodes)])
            found[f'torch.ops.{node.target}'].append(sum(t.numel() * t.element_size() for t in tensors))
    return found


TRITON_KERNEL = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str", re.S)
TRITON_CALL = re.compile(r'\s+(triton_\w+)\.run\(')
LIBRARY_CALL = re.compile(r'\s+(?:\w+ = )?(extern_kernels\.\w+|torch\.ops\.[\w.]+|aten\.[\w.]+)\(')


def calls(source, own):
    """The Calls of a graph's code. own: see own_kernels."""
    sizes = {}
    for name, kernel in TRITON_KERNEL.findall(source):
        size = re.search(r'num_gb = ([\d.e+-]+)', kernel)
        sizes[name] = float(size[1]) * 1e9
    for line in source[source.index('def call(self, args):'):].splitlines():
        if found := TRITON_CALL.match(line):
            yield Call('triton', found[1], sizes[found[1]])
        elif found := LIBRARY_CALL.match(line):
            kind = 'triton' if found[1] in own else 'library'
            yield Call(kind, found[1], own[found[1]].pop(0) if found[1] in own else None)
