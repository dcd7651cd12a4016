"""What the ledger does not cover of attention kernels, fused kernels and compiled steps under PyTorch's frameworks."""

from __future__ import annotations

from peakcast.models.ledger.scope import facts as job
from peakcast.models.ledger.scope.fact import Fact, above, differs, option, setting, trait
from peakcast.models.ledger.scope.table import Section, fails, less, more, nearly, nearly_more, unknown
from peakcast.networks.families import family_of

# fmt: off
ATTENTION = Section("attention kernels", (
    fails("attention", job.flash & ~trait("attention.flash"),
          "model_type={architecture.model_type!r} has no flash_attention_2 in transformers; use eager."),
    fails("attention", job.flex & ~trait("attention.flex"),
          "model_type={architecture.model_type!r} has no flex_attention in transformers; use sdpa."),
    more("attention", job.flex & setting("architecture.attention_sinks") & job.autocast,
         "attention sinks with flex_attention under autocast: not all of their float32 tensors are counted; use eager."),
    fails("attention", job.flex & job.trains & above("architecture.attention_dropout", 0),
          "flex_attention has no dropout: transformers refuses attention_dropout={architecture.attention_dropout}."),
    fails("attention", job.flash & setting("precision.parameters", "float32") & ~(job.autocast | job.mixed_precision),
          "flash_attention_2 has no kernel for float32; use autocast or half precision."),
    more("attention", job.flash & differs("flash attention"),
         "flash_attention_2 of Falcon, whose key heads are copied for it, is not modelled; use sdpa."),
    more("attention", job.alibi_in_mask & (job.eager | job.offloads_activations),
         "{architecture.name!r} adds ALiBi's biases to scores in float32 with attention='eager', and to a mask that is "
         "offloaded with every layer: neither is counted, up to 40 % of a small network's step; use sdpa."),
    nearly("offload.activations", differs("activations offloaded from eager attention or under autocast")
           & job.offloads_activations & (job.eager | job.autocast),
           "Falcon's offloaded activations with eager attention or under autocast are up to 1.2 % off their trace.",
           share=0.012),
    unknown("attention", job.flash & setting("batch.form", "padding_free") & ~trait("attention.passes_positions"),
            "model_type={architecture.model_type!r} passes no positions to attention, so flash_attention_2 over "
            "padding-free batches is not modelled for it."),
))

FUSED_KERNELS = Section("fused kernels", (
    more("framework_options.liger_kernels", (job.liger | job.ligers_loss) & trait("libraries.liger", "none"),
         "Liger has no kernels for model_type={architecture.model_type!r}, which runs without them."),
    fails("loss.fused_linear_cross_entropy", job.ligers_loss & trait("libraries.liger", "layers"),
          "Liger has no fused loss for Granite and raises an error; set loss.fused_linear_cross_entropy=false."),
    less("framework_options.liger_kernels", job.liger & job.experts, "Liger's kernels for experts are not modelled."),
    more("framework_options.fused_kernels", option("fused_kernels") & ~trait("libraries.fms_acceleration"),
         "fms-acceleration has no kernels for model_type={architecture.model_type!r}, which runs without them."),
    less("versions.unsloth", job.unsloth & ~trait("libraries.unsloth"),
         "Unsloth compiles model_type={architecture.model_type!r} as transformers has it, which is not modelled."),
    more("framework_options.loss_kernel",
         option("loss_kernel", "in_place", "chunked") & (job.divides_model | job.compiles | job.preference),
         "loss_kernel={loss_kernel!r} is modelled for cross entropy on whole logits, without torch.compile."),
    unknown("framework_options.loss_kernel",
            option("loss_kernel", "tiles") & (job.divides_model | job.compiles | ~job.decoder | job.generates),
            "TRL's own head of SFTTrainer (loss_kernel='tiles') was compared with traces of decoders without tensor, "
            "pipeline and context parallelism and without torch.compile only."),
    more("framework_options.lora_kernel",
         job.fused_lora & (job.divides_model | job.sharded_otherwise_than_fsdp1 | job.zero | job.compiles),
         "fused LoRA is modelled on one GPU and with FSDP1, without torch.compile."),
))

# torch 2.5 `_inductor/runtime/triton_heuristics.py` `clone_args`, Triton 3.1 `testing.py` `do_bench`
TIMED_KERNELS = Section("kernels that are timed", when=job.times_kernels_on_copies, rows=(
    nearly_more("versions.torch",
                job.adapts | job.optimizer_in_backward | job.optimizer("adafactor", "adalomo", "lomo", "sgd"),
                "Before torch 2.6, Inductor times the variants of a kernel in its first run, on copies of what the kernel "
                "overwrites and beside 256 MB that it writes in between. A first step needs that much more than counted, "
                "which can be the run's peak where optimizer states are small, as here; 2.6 copies to the host."),
))

# -- torch.compile: what `peakcast verify agreement` has compiled --------------------------------------------------------

_ONE = ~job.many_ranks
_IN_SHARDS = job.shards_layers_alone & option("compiled_regions", "layers", "network_in_parts")
_WHOLE = option("compiled_regions", "network")
_DIVIDED = option("compiled_regions", "network_in_parts") & job.huggingface
"""FSDP2's hooks divide what accelerate compiles in one call."""
_LAYERS_EAGER = _DIVIDED & job.full_checkpointing & ~job.some_layers
"""Dynamo compiles nothing within `torch.utils.checkpoint` that does not begin in a graph."""
_ADAPTS = job.adapts & ~(_LAYERS_EAGER & setting("finetuning.method", "lora") & ~job.quantized)
"""Whether there are adapters in what is compiled."""
_CAST = job.autocast & _ONE
"""Weights are cast; FSDP2 gathers them narrow already."""
_CHANGED_GRAPHS = (
    ("autocast of a whole network", _CAST & _WHOLE),
    ("autocast of layers", _CAST & ~_WHOLE),
    ("checkpointing of a whole network", _WHOLE & job.checkpoints),
    ("full checkpointing of layers", ~_WHOLE & ~_DIVIDED & job.full_checkpointing),
    ("selective checkpointing of layers", ~_WHOLE & job.selective),
    ("adapters of a whole network", _WHOLE & job.adapts),
    ("adapters of layers", ~_WHOLE & _ADAPTS),
    ("layers in shards", _IN_SHARDS),
    ("layers in shards with accelerate", _IN_SHARDS & job.huggingface & ~_DIVIDED),
    ("a network in shards with accelerate", _IN_SHARDS & _DIVIDED),
    ("float8 of a whole network", _WHOLE & job.float8),
    ("float8 of a whole network with checkpointing", _WHOLE & job.float8 & job.checkpoints),
    ("float8 in layers", ~_WHOLE & job.float8),
    ("float8 in layers with checkpointing", ~_WHOLE & job.float8 & job.checkpoints),
    ("weights of layers gathered in float8", ~_WHOLE & job.float8 & option("fsdp_float8_all_gather")),
)
"""What changes a family's graphs, and when."""


def _compared(change: str) -> Fact:
    """Whether the family's graphs with that change, or "alone", were compared with a trace (`TraceTraits.compiled`)."""
    return Fact(lambda job: change in family_of(job.architecture).traces.compiled, change)


COMPILED = Section(
    "torch.compile", when=job.compiles, start="compile=true ",
    end=" is not modelled; `peakcast explain --trace` shows it where it can compile the step (needs torch).", rows=(
    Section("torch.compile of the loss alone", when=option("compiled_regions", "loss"), rows=(
        unknown("compile", job.tensor_parallel | job.preference, "of a loss over logits in parts"),
    )),
    Section("torch.compile", when=~option("compiled_regions", "loss"), rows=(
        unknown("compile", ~(job.huggingface | job.plain_torch), "with framework={framework!r}"),
        unknown("compile", job.many_ranks & ~_IN_SHARDS, "on several ranks, but for layers that FSDP2 shards,"),
        unknown("compile", ~job.trains, "other than for training"),
        unknown("compile", _ADAPTS & job.many_ranks, "with adapters on several ranks"),
        unknown("compile",
                _ADAPTS & job.checkpoints & ~(job.full_checkpointing & option("checkpoints_around_compiled")),
                "with adapters and checkpointing other than full around what is compiled,"),
        unknown("compile",
                _ADAPTS & (~setting("finetuning.method", "lora") | job.quantized | above("finetuning.dropout", 0)),
                "with adapters other than plain ones without dropout"),
        unknown("compile", _ADAPTS & job.autocast, "with adapters under autocast"),
        unknown("compile",
                _ADAPTS & ~(job.adapters_stored_in("float32") | (~_WHOLE & job.adapters_stored_in("bfloat16"))),
                "with adapters that are not float32, or bfloat16 in layers,"),
        unknown("compile", ~_compared("alone") | job.experts, "of {architecture.name!r}"),
        unknown("compile", _WHOLE & (job.selective | job.some_layers),
                "of a whole network with checkpointing of some layers, or of some operations,"),
        unknown("compile", job.checkpoints & job.reentrant & ~_LAYERS_EAGER, "with reentrant checkpointing"),
        unknown("compile", ~job.sdpa, "with attention={attention!r}"),
        unknown("compile", ~((_CAST & job.used_in("float32")) | (~_CAST & job.used_in("bfloat16"))),
                "of other weights than bfloat16, or float32 under autocast,"),
        unknown("compile", job.float8 & _DIVIDED, "of a network in shards with products in float8"),
        unknown("compile", job.float8 & _WHOLE & option("float8_recipe", "rowwise", "rowwise_with_gw_hp"),
                "of a whole network with rowwise scales of float8"),
        unknown("compile", ~(job.computes_bfloat16 | job.float8), "of products in other than bfloat16 or float8"),
        unknown("compile", job.autocast & ~(job.huggingface | (_WHOLE & _CAST)),
                "under autocast, in shards or layer by layer, without accelerate,"),
        *(unknown("compile", asked & ~_compared(change), f"with {change} of {{architecture.name!r}}")
          for change, asked in _CHANGED_GRAPHS),
        unknown("compile", (job.selective | (job.some_layers & _DIVIDED)) & job.huggingface & _IN_SHARDS,
                "with selective checkpointing around layers that are compiled in place"),
        unknown("compile", ~job.default_batch | job.offloads, "with padding, packing or offloading"),
        unknown("compile", job.fused_loss | job.liger, "with Liger's kernels"),
        unknown("compile", option("neftune"), "with neftune"),
        unknown("compile", option("smooths_labels"), "with smoothed labels"),
        unknown("compile", _WHOLE & job.checkpoints & job.windows_in_some_layers,
                "with checkpointing of a whole network of layers with and without a window"),
        unknown("compile", job.beyond_window, "beyond the sliding window"),
    )),
))
