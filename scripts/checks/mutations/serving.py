"""Text, threads, Ctrl-C, and models that fail: ``LLM`` and the server."""

from __future__ import annotations

from checks.mutations.mutation import Mutation

MUTATIONS = {
    "bytes_shown_while_they_may_change": Mutation(
        "absorbed_mla/serving/tokenizers/detokenizer.py", "_LONGEST_WAIT = 64", "_LONGEST_WAIT = 4"
    ),
    "numbers_without_a_token_end_a_run": Mutation(
        "absorbed_mla/serving/tokenizers/token_bytes.py",
        "if token not in left_out and self._exists(token)",
        "if token not in left_out",
    ),
    "long_runs_that_are_no_text_are_shown_as_text": Mutation(
        "absorbed_mla/serving/tokenizers/detokenizer.py",
        "self._is_text = _begins_text(data)",
        "pass",
    ),
    "a_prompts_half_character_is_forgotten": Mutation(
        "absorbed_mla/serving/tokenizers/detokenizer.py", "data = self._before + data", "pass"
    ),
    "added_tokens_are_names_of_bytes": Mutation(
        "absorbed_mla/serving/tokenizers/token_bytes.py",
        "bytes(table[c] for c in name) if table.keys() >= set(name) else name.encode()",
        "bytes(table[c] for c in name if c in table)",
    ),
    "token_bytes_without_the_space_before": Mutation(
        "absorbed_mla/serving/tokenizers/token_bytes.py",
        "(twice[len(once) :] if twice.startswith(once) else once)",
        "once",
    ),
    "stop_strings_held_back_are_missed": Mutation(
        "absorbed_mla/serving/output_processor.py",
        "return\n            output",
        "pass\n            output",
    ),
    "log_probs_of_one_text_hide_each_other": Mutation(
        "absorbed_mla/serving/server/logprobs.py",
        "if name is None or name in names else name)",
        "if name is None else name)",
    ),
    "chat_bytes_of_the_text": Mutation(
        "absorbed_mla/serving/server/logprobs.py",
        "list(one.token_bytes),",
        'list((one.decoded_token or "").encode()),',
    ),
    "nan_draws_a_token": Mutation(
        "absorbed_mla/serving/sampling/device_sampler.py",
        "tokens.where(logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).isfinite(), -1)",
        "tokens",
    ),
    "infinity_draws_a_token": Mutation(
        "absorbed_mla/kernels/sampling/weights.py",
        """(logit > float("-inf")) & (logit < float("inf"))""",
        "logit == logit",
    ),
    "loop_takes_no_notice_of_failures": Mutation(
        "absorbed_mla/serving/scheduler/overlap_scheduler.py",
        "zip(step.numbers, tokens) if token < 0}",
        "zip(step.numbers, tokens) if False}",
    ),
    "failures_of_the_step_after": Mutation(
        "absorbed_mla/serving/scheduler/model_runner.py",
        "        self._tokens[:count].masked_fill_(missing[0], -1)\n",
        "",
    ),
    "sampler_takes_no_notice_of_failures": Mutation(
        "absorbed_mla/serving/sampling/sampler.py",
        "if missing is not None and missing.any():",
        "if False:",
    ),
    "drafts_that_are_wrong_fail_a_request": Mutation(
        "absorbed_mla/serving/request_results.py",
        "if place is not None and place < len(progress.tokens):",
        "if place is not None:",
    ),
    "failed_requests_keep_what_came_after": Mutation(
        "absorbed_mla/serving/request_results.py",
        "result.tokens[:count]",
        "result.tokens",
    ),
    "failed_requests_run_on": Mutation(
        "absorbed_mla/serving/engine.py",
        "            requests.to_abort |= requests.failures.numbers\n",
        "            pass\n",
    ),
    "a_failure_is_an_answer": Mutation(
        "absorbed_mla/serving/server/app.py", "                require_no_failure(done)\n", ""
    ),
    "nan_in_json": Mutation(
        "absorbed_mla/serving/server/logprobs.py", "if math.isnan(one.logprob):", "if False:"
    ),
    "top_p_leaves_a_token_too_many": Mutation(
        "absorbed_mla/serving/sampling/device_sampler.py", "before >= limit", "before > limit"
    ),
    "top_p_kernel_leaves_a_token_too_many": Mutation(
        "absorbed_mla/kernels/sampling/thresholds.py",
        "(goal.to(tl.float64) < limit)",
        "(goal.to(tl.float64) <= limit)",
    ),
    "min_p_leaves_out_a_tie": Mutation(
        "absorbed_mla/serving/sampling/device_sampler.py", "~(shares >= min_p)", "~(shares > min_p)"
    ),
    "min_p_kernel_leaves_out_a_tie": Mutation(
        "absorbed_mla/kernels/sampling/weights.py", "(share >= min_p)", "(share > min_p)"
    ),
    "threads_run_steps_at_once": Mutation(
        "absorbed_mla/serving/llm_engine.py", "with interrupts_deferred(), self._lock:", "if True:"
    ),
    "one_thread_keeps_the_lock": Mutation(
        "absorbed_mla/serving/llm_engine.py",
        "            with self._waiting:\n",
        "            if True:\n",
    ),
    "first_call_to_end_puts_the_model_to_sleep": Mutation(
        "absorbed_mla/serving/llm_engine.py",
        "if self._woken_by_call and not self._requests.of_calls:",
        "if self._woken_by_call:",
    ),
    "ctrl_c_within_a_step": Mutation(
        "absorbed_mla/serving/llm_engine.py", "if not in_main or", "if True or not in_main or"
    ),
    "ctrl_c_for_ever": Mutation(
        "absorbed_mla/serving/llm_engine.py",
        "        if self.received is not None:\n",
        "        if False:\n",
    ),
    "interrupted_requests_run_on": Mutation(
        "absorbed_mla/serving/output_processor.py",
        "            self.abort(name)\n            self._requests.pop(name, None)\n",
        "            self._requests.pop(name, None)\n",
    ),
    "steps_take_outputs_of_calls": Mutation(
        "absorbed_mla/serving/llm_engine.py", "name not in requests.of_calls", "True"
    ),
    "requests_of_calls_are_left_for_steps": Mutation(
        "absorbed_mla/serving/output_processor.py",
        "return any(name not in self.of_calls for",
        "return any(True for",
    ),
    "calls_report_what_they_aborted_to_steps": Mutation(
        "absorbed_mla/serving/output_processor.py",
        "self._aborted if one.request_id not in names",
        "self._aborted",
    ),
    "calls_wait_for_what_sleep_has_aborted": Mutation(
        "absorbed_mla/serving/output_processor.py",
        "left.items() if name in self.of_calls",
        "left.items() if False",
    ),
    "ids_are_given_twice": Mutation(
        "absorbed_mla/serving/output_processor.py", "if not self._is_taken(one))", "if True)"
    ),
    "calls_undo_wake": Mutation(
        "absorbed_mla/serving/llm_engine.py",
        "            self._woken_by_call = False\n            self._wake()\n",
        "            self._wake()\n",
    ),
    "ctrl_c_loses_outputs_of_a_step": Mutation(
        "absorbed_mla/serving/llm_engine.py",
        "requests.unclaimed = {one.request_id: one for one in grown} | requests.unclaimed",
        "pass",
    ),
    "ctrl_c_within_the_lock": Mutation(
        "absorbed_mla/serving/llm_engine.py",
        "            with self._exclusively():\n                grown = self._claim",
        "            with self._lock:\n                grown = self._claim",
    ),
    "ctrl_c_keeps_the_lock": Mutation(
        "absorbed_mla/serving/llm_engine.py",
        "                self._held.release()\n            raise\n",
        "                pass\n            raise\n",
    ),
    "processes_load_tokenizer_code_at_once": Mutation(
        "absorbed_mla/serving/tokenizers/folder.py", "fcntl.flock(lock, fcntl.LOCK_EX)", "pass"
    ),
    "errors_of_ended_ranks_are_lost": Mutation(
        "absorbed_mla/serving/executor/multiprocess.py",
        "error = self._reported(other)",
        "error = None",
    ),
    "causes_of_ended_ranks_are_lost": Mutation(
        "absorbed_mla/serving/executor/multiprocess.py", "(rank, *range(self._world))", "(rank,)"
    ),
    "content_parts_as_python_has_them": Mutation(
        "absorbed_mla/serving/chat_messages.py",
        """return {**message, "content": "".join(map(_text_of, content))}""",
        "return message",
    ),
    "variables_of_the_template_are_dropped": Mutation(
        "absorbed_mla/serving/chat_messages.py",
        "not in _NOT_HERE}, **variables}",
        "not in _NOT_HERE}}",
    ),
    "rows_of_a_matrix_are_one_prompt": Mutation(
        "absorbed_mla/serving/llm.py",
        'and not getattr(prompts[0], "ndim", 0)',
        "",
    ),
    "every_beam_that_ends_counts": Mutation(
        "absorbed_mla/serving/beam_search.py", "in found[:width]", "in found"
    ),
    "a_beam_search_does_not_stop": Mutation(
        "absorbed_mla/serving/beam_search.py",
        "if len(self.ended) == width and best <=",
        "if False and best <=",
    ),
    "a_live_model_sleeps_within_a_beam_search": Mutation(
        "absorbed_mla/serving/llm_engine.py",
        "if self._woken_by_call and not self._calls",
        "if self._woken_by_call",
    ),
    "streamed_tokens_go_on_to_grow": Mutation(
        "absorbed_mla/serving/async_llm.py",
        "token_ids=one.token_ids[:count]",
        "token_ids=one.token_ids",
    ),
    "an_aborted_stream_never_ends": Mutation(
        "absorbed_mla/serving/server/service.py",
        "                    self.llm.abort(name)\n                continue",
        "                    self._streams.pop(name, None)\n"
        "                    self.llm.abort(name)\n                continue",
    ),
    "kimis_words_are_merged": Mutation(
        "absorbed_mla/serving/tokenizers/tiktoken_model.py", ", ignore_merges=True", ""
    ),
    "kimis_chinese_is_cut_as_other_letters": Mutation(
        "absorbed_mla/serving/tokenizers/tiktoken_model.py",
        r"""\p{M}&&[^\p{Han}]]"
_LOWER""",
        r"""\p{M}]"
_LOWER""",
    ),
}
