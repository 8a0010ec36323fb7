"""The ``quantization_config`` of config.json: FP8 blocks, or four-bit weights (``packed.py``)."""

from __future__ import annotations

from checkpoint_conversion.config_fields import Fields
from checkpoint_conversion.packed import GROUP, PACKINGS

FP8_BLOCK = (128, 128)
_METHODS = ("fp8", "compressed-tensors")
# What compressed-tensors may have beside weights. None: other values change what weights mean, or
# quantise more than weights.
_ONLY: dict[str, object] = {
    "kv_cache_scheme": None,
    "quantization_status": "compressed",
    "sparsity_config.format": "dense",
    "transform_config.config_groups": None,
}
# Of the weights of a group of layers.
_WEIGHTS: dict[str, object] = {
    "num_bits": 4,
    "symmetric": True,
    "strategy": "group",
    "group_size": GROUP,
    "actorder": None,
    "block_structure": None,
    "dynamic": False,
}


def check_quantisation(config: Fields) -> None:
    """Record every field of ``quantization_config`` whose weights cannot be read."""
    section = config.section("quantization_config")
    if section is None:
        return
    if section.choice("quant_method", _METHODS) == "compressed-tensors":
        _check_packed(section)
        return
    section.choice("fmt", ("e4m3",), "e4m3")
    section.choice("activation_scheme", ("dynamic",), "dynamic")
    section.choice("scale_fmt", ("float", "ue8m0"), "float")
    if section.raw("weight_block_size") != list(FP8_BLOCK):
        section.wrong("weight_block_size", str(list(FP8_BLOCK)))


def scheme_of(section: object) -> str | None:
    """How weights are quantised, for reports, by a section that has been checked."""
    if not isinstance(section, dict) or not section:
        return None
    for packing in PACKINGS:
        if section.get("format") == packing.format:
            return packing.title
    scales = section.get("scale_fmt") or "float"
    return f"FP8 in blocks of {FP8_BLOCK[0]} x {FP8_BLOCK[1]}, {scales} scales"


def _check_packed(section: Fields) -> None:
    formats = {packing.format: packing for packing in PACKINGS}
    packing = formats[section.choice("format", tuple(formats))]
    for path, value in _ONLY.items():
        inner, name = section.at(path)
        if inner is not None:
            inner.only(name, value, None if value else "left out")
    groups = section.section("config_groups")
    if groups is None or not groups.names():
        section.wrong("config_groups", "an object with a group")
    for name in groups.names() if groups else ():
        group = groups and groups.section(name)
        if group is None:
            continue
        group.only("format", packing.format)
        for activations in ("input_activations", "output_activations"):
            group.only(activations, None, "null: only weights are converted")
        weights = group.section("weights")
        if weights is None:
            group.wrong("weights", "an object")
            continue
        wanted = {**_WEIGHTS, "type": packing.kind}
        for field, value in wanted.items():
            weights.only(field, value, None if value is not None else "null")
        # Left out they would be 8 bits, integers and no groups.
        for field in ("num_bits", "group_size", "type"):
            if not weights.given(field) and wanted[field] != "int":
                weights.wrong(field, str(wanted[field]))
