"""A GPU that is not there: torch.compile's code for a block on an H200, made on any machine, never run.

$ python tests/fake_cuda.py '{"choices": [["off", "tensorwise", "auto"]], "preset": "gpt2", "sequences": 32}'

The last line is JSON: for each choice the bytes of a block's kernels (of the head and its loss with "head":
whether it is in FP8, and "kernel": whether the loss's is ours), their number, the bytes that forward keeps
for backward beside its inputs, how many kernels compute with a maximum in fp32 and leave it to others in
bf16, and with "ptx": true of how many large ones the PTX stores bytes one at a time in every configuration
that Inductor would try, and how many configurations spill. With "gathered" the block's weights are those that
ranks gather in FP8. Inductor's own passes and code generation do the work; what they ask of a device is
answered here. That takes private doors of torch and Triton, so unknown versions are refused.
"""
import contextlib
import dataclasses
import functools
import importlib.util
import json
import pathlib
import re
import sys
import tempfile
import types
from typing import NamedTuple

import torch
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from fp8gpt import fp8
from fp8gpt.fp8 import backends, linear
from fp8_models import extra_tensors
import model
from model import GPT, PRESETS, Linear, rope_tables
import triton_tools
from triton_tools import SHARED_MEMORY


class Kernel(NamedTuple):
    """A launch. bytes: read and written. source: of Inductor's Triton; '' for a kernel of our own."""
    name: str
    bytes: float
    source: str


def problem():
    """Return why this machine's torch or Triton will not do, or ''."""
    if importlib.util.find_spec('triton') is None:
        return 'there is no Triton, which torch.compile\'s code for a GPU wants'
    import triton
    for module, first, end in (torch, (2, 11), (2, 16)), (triton, (3, 6), (3, 10)):
        if not first <= tuple(map(int, module.__version__.split('.')[:2])) < end:
            return f'{module.__name__} {module.__version__} may have its private doors elsewhere'
    return ''


def pretend():
    """Answer for an H200 whoever asks torch.cuda, Inductor or Triton. This process has no other use then."""
    import triton
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import config
    from torch._inductor.fx_passes import joint_graph, post_grad
    from torch._inductor.runtime import triton_helpers, triton_heuristics
    from torch._subclasses import fake_tensor
    for passes in joint_graph, post_grad:   # their patterns are traced while there is no CUDA yet
        passes.lazy_init(torch.device('cpu'))
        passes.lazy_init = nothing
    properties = types.SimpleNamespace(
        name='NVIDIA H200', major=9, minor=0, multi_processor_count=132, total_memory=150 << 30,
        regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
        warp_size=32, shared_memory_per_block_optin=SHARED_MEMORY, gcnArchName='', uuid='0', pci_bus_id=0,
        shared_memory_per_multiprocessor=SHARED_MEMORY + 1024, L2_cache_size=50 << 20)
    values = {
        'is_available': True, 'device_count': 1, 'current_device': 0, 'get_device_properties': properties,
        'get_device_capability': (9, 0), 'get_device_name': 'NVIDIA H200', 'is_bf16_supported': True,
        'memory_allocated': 0, 'get_rng_state': torch.zeros(16, dtype=torch.uint8), 'set_rng_state': None,
        'set_device': None, 'synchronize': None, '_lazy_init': None}
    answers = {question: functools.partial(nothing, answer=answer) for question, answer in values.items()}
    torch._C._ensureCUDADeviceGuardSet()
    ops = torch.ops.aten    # these three methods ask a CPU build for the device
    for method, op in (('__invert__', ops.bitwise_not), ('copy_', ops.copy_), ('contiguous', ops.contiguous)):
        setattr(torch.Tensor, method, functools.partialmethod(lambda x, *a, op, **k: op(x, *a, **k), op=op))
    for question, answer in answers.items():
        setattr(torch.cuda, question, answer)
        if hasattr(CudaInterface, question):
            setattr(CudaInterface, question, staticmethod(answer))
    torch.cuda.device = torch.cuda._DeviceGuard = CudaInterface.device = no_device
    CudaInterface.Worker.get_device_properties = staticmethod(answers['get_device_properties'])
    CudaInterface.Worker.current_device = staticmethod(answers['current_device'])
    torch._C._cuda_getCurrentRawStream = fake_tensor.init_gpu_context = nothing
    triton_helpers.set_driver_to_gpu = triton_heuristics.set_driver_to_gpu = nothing
    config.use_static_cuda_launcher = False
    triton.runtime.driver.set_active(triton_tools.Gpu(90))


def nothing(*arguments, answer=None, **kwargs):
    return answer


@contextlib.contextmanager
def no_device(*arguments):
    yield


class Done(Exception):
    """What is wanted is there; the rest would run it."""


class Hopper:
    """torch.nn.functional as model.py sees it, with the attention that a Hopper GPU takes."""

    def __getattr__(self, name):
        return getattr(torch.nn.functional, name)

    @staticmethod
    def scaled_dot_product_attention(q, k, v, attn_mask=None, is_causal=False, enable_gqa=False):
        attention = torch.ops.aten._scaled_dot_product_cudnn_attention
        return attention(q, k, v, attn_bias=attn_mask, compute_log_sumexp=True, is_causal=is_causal)[0]


def as_gathered(module):
    """Give an Fp8Linear its weight as ranks gather it: W in FP8, and a handle that takes no memory."""
    shape = module.weight.shape
    module.weight = torch.nn.Parameter(torch.zeros((), dtype=torch.bfloat16).expand(shape))
    module.w8, module.w8_scale_inv = torch.zeros(shape, dtype=torch.float8_e4m3fn), torch.ones(1, 1)


def kernels_by(config, sequences, choice, asked):
    """Return the Kernels of a block by an fp8.Choice, or of the head and its loss, of normed activations,
    forward and backward, in their order, and the bytes of tensors that backward keeps beside inputs."""
    model.F, model.NO_BF16_UNITS = Hopper(), False
    torch.compiler.is_compiling = lambda: True          # Dynamo, which would say so, is not asked
    linear.on_cpu = backends.on_cpu = lambda x: False   # the graphs' devices are replaced after tracing
    with FakeTensorMode(allow_non_fake_inputs=True):
        gpt = GPT(dataclasses.replace(config, n_layer=1), fp8.linear_factory(choice, Linear), seed=None)
        x = torch.zeros(sequences, config.block_size, config.n_embd, dtype=torch.bfloat16, requires_grad=True)
        rope = list(rope_tables(config, config.block_size)) if config.position == 'rope' else []
        block = gpt.h[0]
        for module in fp8.fp8_linears(block).values() if 'gathered' in asked else ():
            as_gathered(module)
        names, buffers = list(dict(block.named_parameters())), extra_tensors(block)

        def run_block(*flat):
            weights, rest = flat[:len(names)], flat[len(names):]
            (x, delta), tables = rest[:2], rest[2:2 + len(rope)]
            state = dict(zip(names, weights)) | dict(zip(buffers, rest[2 + len(rope):]))
            return torch.func.functional_call(block, state, (x, delta, tables or None, None))

        def run_head(weight, *inputs):
            return torch.func.functional_call(gpt, {'wte.weight': weight}, inputs, tie_weights=True)

        if 'head' in asked:
            gpt.forward, gpt.compiled = gpt.head_nats, True
            model.takes_kernel = lambda logits: asked['kernel']
            graphs = partition(run_head, [gpt.wte.weight, x, torch.zeros(x.shape[:2], dtype=torch.int64)], 1)
        else:
            stream = [x, x.detach().requires_grad_()]
            inputs = [*block.parameters(), *stream, *rope, *buffers.values()]
            graphs = partition(run_block, inputs, len(names))
    [(outputs,)] = (node.args for node in graphs[0].graph.nodes if node.op == 'output')
    made = {node: node.meta['val'] for node in outputs if node is not None and node.op != 'placeholder'}
    kept = sum(value.nbytes for value in made.values() if torch.is_tensor(value))
    return [kernel for number, graph in enumerate(graphs) for kernel in kernels_of(graph, bool(number))], kept


def partition(function, inputs, parameters):
    """Return the graphs of forward and backward, by Inductor's passes and partitioner."""
    from torch._functorch.aot_autograd import aot_function
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor import compile_fx
    from torch._inductor.decomposition import select_decomp_table
    graphs = []

    def split(joint, joint_inputs, *, static_lifetime_input_indices=None, **options):
        compile_fx._recursive_joint_graph_passes(joint)
        graphs.extend(min_cut_rematerialization_partition(
            joint, joint_inputs, compiler='inductor',
            static_lifetime_input_indices=list(range(parameters)), **options))
        raise Done

    with contextlib.suppress(Done):
        aot_function(function, fw_compiler=None, partition_fn=split, decompositions=select_decomp_table(),
                     num_params_buffers=parameters, keep_inference_input_mutations=True)(*inputs)
    return graphs


def kernels_of(graph, backward):
    """Return the Kernels of a graph that was traced on a CPU, as Inductor makes them for the GPU."""
    import torch._inductor.config as settings
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.graph import GraphLowering
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp
    gpu, sources, build = torch.device('cuda', 0), [], GraphLowering.compile_to_module
    nodes = [node for node in graph.graph.nodes]
    for node in nodes:
        node.args = tuple(gpu if isinstance(value, torch.device) else value for value in node.args)
        node.kwargs = {name: gpu if isinstance(value, torch.device) else value
                       for name, value in node.kwargs.items()}
    graph.recompile()
    example = [node.meta['val'] for node in nodes if node.op == 'placeholder']
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        example = [torch.empty_strided(e.shape, e.stride(), dtype=e.dtype, device=gpu)
                   if isinstance(e, torch.Tensor) else e for e in example]
        FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*example)
    own = [Kernel(str(node.target), sum(t.nbytes for t in tree_leaves(
        [node.meta['val'], *(n.meta['val'] for n in node.all_input_nodes)]) if t is not None), '')
        for node in nodes if str(node.target).startswith(('fp8_kernels.', 'auto_functionalized'))]

    def keep(self):
        code, _ = self.codegen()
        sources.append(getattr(code, 'value', code))
        raise Done

    GraphLowering.compile_to_module = keep
    try:    # benchmark_kernel writes each kernel's bytes beside it
        with settings.patch(fx_graph_cache=False, compile_threads=1, benchmark_kernel=True):
            compile_fx_inner(graph, example, static_input_idxs=[], is_backward=backward, cudagraphs=False)
    except Exception:
        if not sources:
            raise
    finally:
        GraphLowering.compile_to_module = build
    [source] = sources
    bodies = dict(re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str", source, re.S))
    sizes = {name: float(re.search(r'num_gb = ([\d.e+-]+)', body)[1]) * 1e9 for name, body in bodies.items()}
    launched = re.findall(r'^\s+(triton_\w+)\.run\(', source[source.index('def call(self, args):'):], re.M)
    return [*(Kernel(name, sizes[name], bodies[name]) for name in launched), *own]


def splits_a_maximum(kernel):
    """Return whether a Kernel stores a maximum rounded to bf16, and computes with it not rounded."""
    for pointer, value in re.findall(r'tl\.store\((\w+) \+ .*, (tmp\d+), ', kernel.source):
        if f"'{pointer}': '*bf16'" in kernel.source and f'{value} = triton_helpers.max2(' in kernel.source:
            uses = re.findall(rf'= .*\b{value}\b(?!\.to\(tl\.bfloat16\))', kernel.source)
            if uses:
                return True
    return False


def ptx(kernel, folder):
    """Return the PTX of each configuration of a Kernel that Inductor would try, as Triton's ptxas took it."""
    path = folder / f'{kernel.name}.py'
    path.write_text(kernel.source.replace('triton_helpers.set_driver_to_gpu()', ''))
    spec = importlib.util.spec_from_file_location(kernel.name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tuner = getattr(module, kernel.name)
    tuner.precompile(warm_cache_only=True)
    return [result.kernel.asm['ptx'] for result in tuner.compile_results]


def main(asked):
    """Print what the docstring says."""
    pretend()
    found = []
    for backend, recipe, kernels in asked['choices']:
        options = fp8.Options(head=bool(asked.get('head')))
        choice = fp8.Choice(backend, recipe, kernels=kernels, reason='counted', options=options)
        launches, kept = kernels_by(PRESETS[asked['preset']], asked['sequences'], choice, asked)
        row = {'bytes': sum(kernel.bytes for kernel in launches), 'launches': len(launches), 'kept': kept,
               'split maxima': sum(map(splits_a_maximum, launches))}
        if asked.get('ptx'):
            folder = pathlib.Path(tempfile.mkdtemp())
            large = [kernel for kernel in launches if kernel.source and kernel.bytes > 2e7]
            texts = [ptx(kernel, folder) for kernel in large]
            row |= {'assembled': len(texts),
                    'spills': sum('.local' in text for each in texts for text in each),
                    'scattered': sum(all('st.global.b8' in text for text in each) for each in texts)}
        found.append(row)
    print(json.dumps(found))


if __name__ == '__main__':
    main(json.loads(sys.argv[1]))
