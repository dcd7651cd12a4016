"""Which jobs recipes cover, and findings about those that they do not."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from peakcast.core.errors import near_misses
from peakcast.core.fields import FrozenMapping
from peakcast.core.findings import FAILS, LESS, MORE, Finding, found
from peakcast.core.versions import NEWEST, release
from peakcast.dialects.common.own_networks import TRANSFORMERS, library_of, own_network
from peakcast.jobs.conventions import conventions, mixes_precision
from peakcast.jobs.images import reads_pixels, sees_images
from peakcast.jobs.spec import TrainingJob
from peakcast.models.ledger.layouts.module_tree import BlockKind, block_of
from peakcast.models.ledger.recorded.outside_layers import overlap
from peakcast.models.recipes.baseline_choice import chosen, stack_traces
from peakcast.models.recipes.lent import lent
from peakcast.models.recipes.recipe import Recipe
from peakcast.models.recipes.recordable import cannot_be_recorded
from peakcast.models.recipes.shelf import installed_libraries, recipe_of, recipes_of, wants_recipe, why_not
from peakcast.models.recipes.shipped import nearest_shipped
from peakcast.networks.config import left_out_of
from peakcast.networks.families import family, model_types

RECORDED_KERNELS = ("flash-linear-attention",)
"""Packages of kernels that a recording runs where they are installed: Triton's, which need no GPU to be traced."""
TILES = "tiles"
"""The convention `loss_kernel` of TRL's head, which projects tiles of the hidden states."""
KERNELS = ("norm_kernel", "rotary_kernel", "gated_activation_kernel", "loss_kernel")
"""Conventions that name the kernels which a network and its loss run."""
SHORT_CONVOLUTIONS = {"causal_conv1d"}
"""Packages whose kernels save a copy or two of a layer's input; other ones save loops over the sequence."""


def no_recipe(job: TrainingJob) -> str:
    """Why a job that needs a recipe has none; "" if it has one."""
    if recipe_of(job) is not None and not cannot_be_recorded(job):
        return ""
    if reason := cannot_be_recorded(job):
        return reason
    if (brought := lent()) is not None:
        return brought.why_not(job)
    others = "; ".join(one.range_in_words() for one in recipes_of(job))
    reason = why_not(job) or (f"its recipe is of {others}" if others else "no recipe of it has been recorded")
    near = nearest_shipped(job)
    return f"{reason}; the nearest that comes with peakcast is {near}" if near else reason


def recipe_findings(job: TrainingJob) -> tuple[Finding, ...]:
    """Findings about what differs from the recording, for a job that needs a recipe."""
    if reason := no_recipe(job):
        return (found(f"{_wanting(job)}, and {reason}{_instead(job)}", "architecture"),)
    return (*lacked_kernels(job), *with_other_kernels(job), *_otherwise_placed(job))


def lacked_kernels(job: TrainingJob) -> tuple[Finding, ...]:
    """The finding that the recipe of `job` was recorded without kernels that a GPU's environment is likely to have."""
    recipe = recipe_of(job) if wants_recipe(job) else None
    return without_kernels(recipe.walk.replaced if recipe else ())


def without_kernels(replaced: Iterable[tuple[str, str]]) -> tuple[Finding, ...]:
    """The finding that kernels were missing where the network was recorded, though a GPU's environment is likely to have
    them. `replaced`: each function that ran as transformers' own code instead, and the package of its kernel."""
    if not (replaced := tuple(replaced)):
        return ()
    functions, packages = (dict.fromkeys(names) for names in zip(*replaced, strict=True))
    recordable = [package for package in packages if package in RECORDED_KERNELS]
    way = f"; if you train with {recordable[0]}, record it where that is installed (pip install)" if recordable else ""
    sentence = (
        f"{' and '.join(packages)} {'was' if len(packages) == 1 else 'were'} not installed where the network was recorded: "
        f"transformers ran its own code of {', '.join(functions)}, which takes more memory than their kernels do{way}."
    )
    effect = LESS if packages.keys() - SHORT_CONVOLUTIONS else ("version_not_modelled", "less")
    return (found(sentence, "versions", effect=effect),)


def with_other_kernels(job: TrainingJob) -> tuple[Finding, ...]:
    """The finding that the job's stack runs kernels that recordings and traces replace by the library's own code; they do
    run Liger's and TRL's head. None if the recipe is of the user's own program, or of a network that the job's library has
    of its own."""
    if lent() is not None or own_network(job) is not None:
        return ()
    chosen = conventions(job)
    run: dict[str, Any] = {"liger_kernels": True} if chosen.get("liger_kernels") else {}
    run |= {"loss_kernel": TILES} if chosen.get("loss_kernel") == TILES else {}
    seen = conventions(job.replace(versions=FrozenMapping(), framework_options=FrozenMapping(run)))
    used = KERNELS if job.finetuning.method == "full" else (*KERNELS, "lora_kernel")
    others = [f"{name}={chosen[name]!r}" for name in used if name in chosen and chosen[name] != seen[name]]
    if not others:
        return ()
    sentence = (
        f"the job runs {', '.join(others)}, and where the network was recorded the library's own code ran, which takes "
        "more memory than such kernels do; ask with your script (`peakcast dryrun`)."
    )
    return (found(sentence, "framework_options", effect=LESS),)


def _otherwise_placed(job: TrainingJob) -> tuple[Finding, ...]:
    """Findings about how this job differs from the recorded one: images, releases, layout."""
    if sees_images(job.architecture) and not (job.images.per_sequence or reads_pixels(job.architecture)):
        sentence = (
            f"{job.architecture.name!r} also sees images, and none are counted: its vision tower's weights are there, "
            "without gradients, optimizer states and activations, as in a step of text alone; give images.per_sequence and "
            "images.height."
        )
        return (found(sentence, "images.per_sequence", effect=MORE),)
    recipe = recipe_of(job)
    if recipe is None:
        return ()
    if other := of_another_release(job, recipe.versions):
        return (other,)
    return gathered_otherwise(job, recipe) if _is_sharded(job) else ()


def of_another_release(job: TrainingJob, versions: Mapping[str, str]) -> Finding | None:
    """The finding that `job` names another release of its library than that of `versions`, whose tensors are counted."""
    library = library_of(job)
    was, asked = (str(one.get(library, "")) for one in (versions, job.versions))
    moves = library != TRANSFORMERS and release(asked) == NEWEST  # a configuration that names no release
    if not was or not asked or moves or release(was)[:2] == release(asked)[:2]:
        return None
    sentence = (
        f"the network's tensors are those of {library} {was}, and {library} {asked} is asked for; record it in an "
        "environment that has that (`peakcast record --python`)."
    )
    return found(sentence, "versions")


def _is_sharded(job: TrainingJob) -> bool:
    """Whether FSDP shards the network."""
    layout = job.parallelism
    return layout.num_replicas > 1 and layout.sharding != "none" and not layout.zero_stage


def gathered_otherwise(job: TrainingJob, recipe: Recipe) -> tuple[Finding, ...]:
    """Findings for tensors that FSDP gathers in other units than the ledger counts."""
    name, layout = job.architecture.name, job.parallelism
    ends_apart = layout.sharding != "fsdp1" and conventions(job).get("fsdp2_units") == "ends"
    if overlap(recipe.walk) and ends_apart:
        sentence = (
            f"FSDP2 fails for {name!r} as accelerate shards it: modules of several groups hold the weight of its token "
            "embedding; use fsdp1, or name the layers' class alone (fsdp_transformer_layer_cls_to_wrap)."
        )
        return (found(sentence, "parallelism.sharding", effect=FAILS),)
    if layout.sharding != "fsdp1" and not mixes_precision(job) and (kept := _kept_wider(recipe)):
        sentence = (
            f"FSDP2 fails for {name!r}: it shards weights of one dtype together, and {kept} stays in float32; use float32 "
            "weights with bfloat16 compute (mixed precision)."
        )
        return (found(sentence, "precision.parameters", effect=FAILS),)
    if any(group.role == "class" for group in recipe.walk.groups) and overlap(recipe.walk):
        sentence = (
            f"FSDP keeps the token embedding of {name!r} twice, in the group that its class makes (_no_split_modules) and "
            "in the root for the lm_head; it is counted once."
        )
        return (found(sentence, "parallelism.sharding", effect=MORE),)
    if not recipe.walk.groups and not recipe.walk.wrapped:
        sentence = (
            f"{name!r} does not name its layers to FSDP (_no_split_modules), which gathers all of them at once unless it "
            "is told their class; they are counted one by one."
        )
        return (found(sentence, "parallelism.sharding", effect=MORE),)
    if not recipe.walk.groups and recipe.odd_ends:
        sentence = (
            f"{name!r} has more weights outside its layers than an embedding, a norm and an lm_head; how "
            f"sharding={layout.sharding!r} groups those is not known, and more may be gathered at a time."
        )
        return (found(sentence, "parallelism.sharding", effect=MORE),)
    return ()


def _kept_wider(recipe: Recipe) -> str:
    """The name of a weight that trains in a wider dtype than another one of its layer; "" if there is none."""
    trained = [(one.module, one.name, one.element_bytes) for one in recipe.walk.parameters if one.trains]
    least: dict[str, int] = {}
    for module, _, size in trained:
        least[module] = min(size, least.get(module, size))
    wider = ((module, name) for module, name, size in trained if size > least[module])
    return next((name for module, name in wider if block_of(module) is BlockKind.LAYER), "")


def recorded_with(job: TrainingJob) -> str:
    """A sentence that says from which recipe or trace of libraries an answer comes; "" if from none."""
    if stack_traces() is not None:
        libraries = ("torch",) if job.framework == "megatron" else ("torch", "transformers")
        installed = installed_libraries()
        releases = " and ".join(f"{name} {installed[name]}" for name in libraries if name in installed)
        return f"the tensors are those of this job's steps with {releases}, traced without a GPU."
    recipe = recipe_of(job)
    if recipe is None or no_recipe(job):
        return ""
    *others, last = (f"{name} {version}" for name, version in recipe.versions.items() if name != "peft")
    releases = " and ".join([", ".join(others), last] if others else [last])
    sentence = f"the network's tensors are those that {releases} make, recorded without a GPU."
    if _is_sharded(job) and recipe.walk.groups and not recipe.walk.wrapped:
        sentence += " It does not name its layers to FSDP (_no_split_modules), which gathers all of them at once."
    if not job.images.per_sequence:
        return sentence
    each = (
        f"are {recipe.walk.image_tokens:,} tokens each"
        if job.images.per_sequence > 1
        else (f"is {recipe.walk.image_tokens:,} tokens")
    )
    return f"{sentence} {job.images} {each}, part of sequence_length; limits of its processor are its class's."


def _wanting(job: TrainingJob) -> str:
    """Why the job needs a recipe."""
    architecture = job.architecture
    if architecture.kind == "multimodal":
        return f"{architecture.name!r} is a vision-language model"
    if family(architecture.model_type) is not None and chosen() == "recipe":
        return f"a recipe of {architecture.name!r} is asked for"
    if family(architecture.model_type) is not None:
        return f"which parts of {architecture.name!r} train is counted by a recipe"
    return f"model_type={architecture.model_type!r} is no family of the ledger"


def _instead(job: TrainingJob) -> str:
    """What is used in place of a recipe, and which keys of the configuration that ignores. A family that recipes come with
    is no misspelt one."""
    architecture = job.architecture
    if architecture.kind == "multimodal":
        return "; its language model alone is counted, without images and without its vision tower."
    if family(architecture.model_type) is not None:
        return "; the ledger's own blocks answer."
    near = "." if nearest_shipped(job) else near_misses(architecture.model_type, model_types()) or "."
    if architecture.kind == "undescribed":
        return near
    unread = left_out_of(json.loads(architecture.configuration)).keys if architecture.configuration else ()
    keys = f"; keys of its configuration that are not read: {', '.join(unread)}" if unread else ""
    return f"; by its keys it is counted as one like Llama's{keys}{near}"
