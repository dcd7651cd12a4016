"""What the ledger covers. For a job that it does not cover, findings give the reasons; the answer never passes for one
inside."""

from __future__ import annotations

from peakcast.core.findings import FAILS, LESS, MORE, NEARLY, NEARLY_MORE, UNKNOWN, Check, Finding, first, found, sentences
from peakcast.jobs.conventions import conventions, fuses_loss
from peakcast.jobs.lengths import lengths_change
from peakcast.jobs.spec import Offload, TrainingJob
from peakcast.models.ledger.layouts import gathered_dtype
from peakcast.models.ledger.recorded.covering import recipe_findings
from peakcast.models.ledger.scope.adapter import adapter_reason
from peakcast.models.ledger.scope.compile import compile_reason
from peakcast.models.ledger.scope.kernel import fused_kernels_reason
from peakcast.models.ledger.scope.mixture import kernels_reason, mixture_reason
from peakcast.models.ledger.scope.network import architecture_reason, encoder_decoder_reason
from peakcast.models.ledger.scope.parallel import parallel_reason
from peakcast.models.ledger.scope.preference import preference_reason
from peakcast.models.ledger.scope.zero import zero_reason
from peakcast.models.recipes.baseline_choice import tracer
from peakcast.models.recipes.shelf import wants_recipe
from peakcast.networks.families import family_of


def scope_findings(job: TrainingJob) -> tuple[Finding, ...]:
    """Why the ledger does not cover `job`: a finding for each part of it; none if it covers all."""
    if tracer() is not None:
        return ()
    if wants_recipe(job):
        return recipe_findings(job)
    reasons = [_batch_reason(job), preference_reason(job), _lengths_reason(job), _frozen_reason(job)]
    if job.framework == "megatron":
        from peakcast.models.ledger.megatron.scope import megatron_findings

        reasons += megatron_findings(job)
    else:
        reasons += [architecture_reason(job.architecture), encoder_decoder_reason(job), parallel_reason(job)]
        reasons += [_huggingface_reason(job), mixture_reason(job), adapter_reason(job), kernels_reason(job)]
        reasons += [fused_kernels_reason(job)]
        reasons += [zero_reason(job), compile_reason(job), _in_backward_reason(job)]
    return tuple(reason for reason in reasons if reason)


def out_of_scope(job: TrainingJob) -> str:
    """The sentences of `scope_findings` as one text; "" if the ledger covers `job`."""
    return " ".join(sentences(scope_findings(job)))


def _frozen_reason(job: TrainingJob) -> Finding | None:
    if not job.finetuning.frozen:
        return None
    sentence = (
        f"finetuning.frozen={', '.join(job.finetuning.frozen)} is counted from recipes and traces alone, and these weights "
        "are counted as if they trained; ask with baseline recipe."
    )
    return found(sentence, "finetuning.frozen", effect=LESS)


def _batch_reason(job: TrainingJob) -> Finding | None:
    if job.batch.form == "rows" or (job.framework != "megatron" and job.architecture.kind == "decoder"):
        return None
    said = f"batch.form={job.batch.form!r} is modelled for decoders of Hugging Face transformers only."
    return found(said, "batch.form")


def _lengths_reason(job: TrainingJob) -> Finding | None:
    """Changing lengths in settings that no collector runs."""
    layout = job.parallelism
    shared = layout.tensor_parallel_size * layout.pipeline_parallel_size * layout.context_parallel_size > 1
    otherwise = job.compile or job.task != "train" or job.framework == "megatron" or job.architecture.kind != "decoder"
    if lengths_change(job) and (shared or otherwise):
        return found(
            f"batch.shortest_sequence={job.batch.shortest_sequence}: lengths that change are modelled in training decoders "
            "without tensor, pipeline and context parallelism, compile and Megatron.",
            "batch.shortest_sequence",
        )
    return None


def _in_backward_reason(job: TrainingJob) -> Finding | None:
    """What of optimizers that update during backward no trace has confirmed."""
    at_once = bool(conventions(job).get("optimizer_in_backward"))
    if job.optimizer.name not in ("lomo", "adalomo") and not at_once:
        return None
    name = f"optimizer.name={job.optimizer.name!r} updates in backward, which"
    checks: list[Check] = [
        (
            at_once and job.gradient_accumulation_steps > 1,
            "leaves no gradient to add to; use gradient_accumulation_steps=1, or set optimizer_in_backward=false.",
            FAILS,
            "gradient_accumulation_steps",
        ),
        (
            at_once and (job.finetuning.method != "full" or job.precision.main_parameters is not None),
            "is modelled with full fine-tuning and no second copy of the weights only.",
        ),
        (at_once and job.optimizer.name == "muon", "would make a Muon of every vector, which takes matrices only.", FAILS),
        (
            job.parallelism.world_size > 1 and not (at_once and _under_fsdp2(job)),
            "is modelled on one GPU only, or with an optimizer for each parameter under FSDP2.",
        ),
        (
            at_once and job.offload.parameters,
            "is not modelled with offloaded parameters: FSDP2 then waits for each gradient on the host.",
        ),
        (job.compile, "is modelled without torch.compile only."),
        (job.loss.kind != "cross_entropy", f"is not modelled with loss.kind={job.loss.kind!r}."),
        (
            bool(conventions(job).get("autocast")) and job.precision.compute == "float16",
            "is not modelled under autocast in float16: the loss scaler would have to be asked for every gradient.",
        ),
        (
            fuses_loss(job) and job.finetuning.method == "full" and not at_once,
            "is not all counted beside a fused loss: backward is up to 1.2 % below its trace.",
            NEARLY_MORE,
        ),
        (
            job.optimizer.name == "adalomo" and job.architecture.moe is not None,
            "fails with experts held in one parameter: lomo-optim 0.1.1 factors matrices only; use lomo.",
            FAILS,
        ),
    ]
    return first(checks, "optimizer.name", start=f"{name} ")


def _under_fsdp2(job: TrainingJob) -> bool:
    """Whether FSDP2 or HSDP shards the network, and neither a pipeline nor ZeRO divides it."""
    layout = job.parallelism
    return layout.sharding in ("fsdp2", "hsdp") and layout.pipeline_parallel_size == 1 and not layout.zero_stage


def _plain_float8(job: TrainingJob) -> bool:
    """Whether float8 is torchao's over weights that blocks use in bf16; FSDP's mixed precision gathers wider weights so.
    GPT-2's Conv1D is not an nn.Linear and is not converted."""
    plain = job.task == "train" and job.finetuning.method == "full" and job.framework in ("huggingface", "torch")
    wide = gathered_dtype(job) == "bfloat16" and not job.framework_options.get("autocast")
    return plain and wide and family_of(job.architecture).libraries.torchao_float8


def _rows(job: TrainingJob) -> int:
    """Tokens of a micro-batch, including padding."""
    return job.num_tokens if job.batch.form == "padding_free" else job.micro_batch_size * job.sequence_length


def _huggingface_reason(job: TrainingJob) -> Finding | None:
    """Why a Hugging Face or torch job is out of scope; None if it is not."""
    family = family_of(job.architecture)
    checks: list[Check] = [
        (
            job.task == "inference" and job.architecture.kind == "encoder",
            f"{job.architecture.name!r} is an encoder, which generates nothing: task='inference' is not modelled for it.",
            UNKNOWN,
            "task",
        ),
        (
            job.task == "inference" and "generation" in family.traces.differ,
            f"generation with model_type={job.architecture.model_type!r}, whose attention has tables of its own, is up to "
            "5 % below its trace.",
            NEARLY_MORE,
            "task",
        ),
        (
            job.task == "inference"
            and "generation in float32" in family.traces.differ
            and job.precision.compute == "float32",
            "generation with BLOOM in float32: scores that its attention names until it has added its output are not all "
            "counted; up to 0.7 % below its trace.",
            NEARLY_MORE,
            "task",
        ),
        (
            job.architecture.mla is not None and bool(conventions(job).get("autocast")),
            "multi-latent attention under autocast is counted without what its concatenations widen.",
            MORE,
            "framework_options.autocast",
        ),
        (
            job.task == "inference" and job.architecture.mla is not None and not conventions(job).get("latent_cache", True),
            "generation with multi-latent attention before transformers 5.17, which cached expanded keys and values, is "
            "counted by its source; no trace has confirmed it.",
            UNKNOWN,
            "versions.transformers",
        ),
        (
            job.optimizer.name == "galore" and family.linear.conv1d,
            "optimizer.name='galore' projects nn.Linear alone, and GPT-2 has Conv1D: it is not modelled there.",
            UNKNOWN,
            "optimizer.name",
        ),
        (
            (job.offload.parameters or job.offload.optimizer)
            and not (_offloads_with_fsdp(job) or _offloads_with_zero(job)),
            "offload of parameters or optimizer states is modelled for FSDP's and ZeRO's only.",
            UNKNOWN,
            "offload",
        ),
        (
            bool(job.activation_checkpointing.modules),
            "activation_checkpointing.modules is not modelled here; without it, matrix products and attention are kept.",
            UNKNOWN,
            "activation_checkpointing.modules",
        ),
        (
            job.architecture.moe is not None
            and conventions(job).get("experts_implementation") == "torchtitan"
            and bool(conventions(job).get("autocast")),
            "torchtitan's experts under autocast have not been traced: their activations are counted without it.",
            MORE,
            "framework_options.autocast",
        ),
        (
            bool(job.framework_options.get("loss_chunks")),
            "a loss in chunks of the sequence is counted as torchtitan 0.3's source has it; traces by hand alone agree.",
            UNKNOWN,
            "framework_options.loss_chunks",
        ),
        (
            job.precision.compute == "float8" and _rows(job) % 16 > 0,
            f"precision.compute='float8' multiplies by tokens, of which torch._scaled_mm takes multiples of 16, and a "
            f"micro-batch has {_rows(job):,}; change micro_batch_size or sequence_length.",
            FAILS,
            "precision.compute",
        ),
        (
            job.precision.compute == "float8" and not _plain_float8(job),
            "float8 compute is modelled for full training of bf16 nn.Linear layers with torchao's dynamic scales alone.",
            UNKNOWN,
            "precision.compute",
        ),
        (
            job.precision.compute == "float8" and job.activation_checkpointing.mode == "selective",
            "float8 compute with selective checkpointing is not modelled: traces multiply otherwise than torch._scaled_mm, "
            "which no list of kept operations has, and are up to 1.6 % lower; use mode=full or none.",
            NEARLY,
            "precision.compute",
        ),
    ]
    return first(checks, "framework_options")


def _offloads_with_zero(job: TrainingJob) -> bool:
    return job.parallelism.zero_stage > 0


def _offloads_with_fsdp(job: TrainingJob) -> bool:
    """FSDP1's CPUOffload and FSDP2's CPUOffloadPolicy move parameters, gradients and the optimizer's states together."""
    layout = job.parallelism
    sharded = layout.sharding in ("fsdp1", "fsdp2", "hsdp") and layout.num_replicas > 1
    return sharded and job.offload == Offload(parameters=True, optimizer=True)
