"""Options of ``LLM``, its engine and sampling: checks, flags, and the way to the engine."""

from __future__ import annotations

from checks.mutations.mutation import Mutation

MUTATIONS = {
    "bounds_of_options_are_not_checked": Mutation(
        "absorbed_mla/serving/option_schema.py", "not one.accepts(value)", "False"
    ),
    "needs_of_options_are_not_checked": Mutation(
        "absorbed_mla/serving/option_schema.py",
        "if _in_use(self, name) else ()",
        "if False else ()",
    ),
    "needs_by_the_engines_names_only": Mutation(
        "absorbed_mla/serving/option_schema.py", "{one.of_engine or own: own for", "{own: own for"
    ),
    "infinity_is_a_number": Mutation(
        "absorbed_mla/serving/option_schema.py", " and abs(value) < math.inf", ""
    ),
    "options_share_one_mapping": Mutation(
        "absorbed_mla/serving/option_schema.py",
        "functools.partial(dict, default)",
        "lambda: default",
    ),
    "flags_switch_on_what_is_on": Mutation(
        "absorbed_mla/serving/option_flags.py", "{flag: not one.default,", "{flag: one.default,"
    ),
    "options_stay_with_llm": Mutation(
        "absorbed_mla/serving/llm_options.py",
        "if name in known}",
        'if name in ("max_requests", "seed")}',
    ),
    "parameters_of_json_are_dropped": Mutation(
        "absorbed_mla/serving/server/protocol.py",
        "{name: getattr(self, name) for name in _SAMPLING}",
        "{}",
    ),
    "generated_texts_of_equal_prompts_are_equal": Mutation(
        "scripts/generation/arguments.py",
        "add_flags(group, SamplingParams, _SAMPLING, FLAGS",
        'add_flags(group, SamplingParams, [*_SAMPLING, "seed"], FLAGS',
    ),
}
