"""CUDA graphs of training and of generation."""

from __future__ import annotations

from checks.mutations.mutation import Mutation

MUTATIONS = {
    "training_graphs_of_everything": Mutation(
        "absorbed_mla/graph_capture.py",
        "return not modules or any(",
        "return any(",
    ),
    "training_graphs_in_fp8": Mutation(
        "absorbed_mla/graph_capture.py",
        '    "fp8": (None, "FP8 was not tried in such graphs"),\n',
        "",
    ),
    "recomputed_gradients_stay": Mutation(
        "absorbed_mla/graph_capture.py",
        "            parameter.grad = None",
        "            pass",
    ),
    "megatrons_graphs_of_prompts": Mutation(
        "absorbed_mla/serving/scheduler/cuda_graphs.py",
        "not (pads_experts or whole_prefills)",
        "not pads_experts",
    ),
    "graphs_of_buffers_that_move": Mutation(
        "absorbed_mla/serving/scheduler/full_cuda_graphs.py",
        "(*self._model.parameters(), *self._model.buffers())",
        "tuple(self._model.parameters())",
    ),
    "graphs_of_another_contexts_tables": Mutation(
        "absorbed_mla/serving/scheduler/full_cuda_graphs.py",
        "buffers = context.memory_buffer.data_ptr(), device_tables(context).data_ptr()",
        "buffers = (context.memory_buffer.data_ptr(),)",
    ),
    "prefill_graphs_of_many_sizes": Mutation(
        "absorbed_mla/serving/scheduler/prefill_graphs.py",
        "count += max(_LEAST_STEP, power // 8)",
        "count += power // 8",
    ),
    "prefill_graphs_beyond_a_step": Mutation(
        "absorbed_mla/serving/scheduler/prefill_graphs.py",
        "return min(most, options.step_tokens)",
        "return most",
    ),
}
