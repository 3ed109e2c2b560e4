"""Of each field of the HTTP API: values that are taken, and values that are refused."""

from __future__ import annotations

from typing import Any, TypeAlias

from deployments.protocol import MAX_CHOICES, ChatRequest, CompletionRequest, GenerationRequest

Kind: TypeAlias = type[GenerationRequest]
KINDS: list[Kind] = [ChatRequest, CompletionRequest]
USER = {"role": "user", "content": "Hi"}

# Field, what is right, what is wrong.
VALUES: list[tuple[str, list[Any], list[Any]]] = [
    ("model", ["demo", "other"], [None, 3, True, ["demo"]]),
    ("stream", [True, False, None], [1, 0, "true", []]),
    ("n", [1, 128, None], [0, -1, 129, 1.0, True, "1"]),
    ("max_tokens", [1, 10**9, 10**30, None], [0, -1, 1.0, True, "1", []]),
    ("temperature", [0, 0.0, 1, 2, 0.7, None], [-0.1, 2.1, float("nan"), float("inf"), True, "1", [1]]),
    ("top_p", [1, 0.1, 1e-9, None], [0, 0.0, -1, 1.1, float("nan"), False, "0.5"]),
    ("min_p", [0, 0.5, 1, None], [-0.1, 1.1, float("nan"), True, "0"]),
    ("top_k", [-1, 0, 1, 2**31 - 1, None], [-2, 2**31, 1.5, True, "1"]),
    ("seed", [0, -1, -(2**63), 2**64 - 1, None], [2**64, -(2**63) - 1, 1.5, True, "1"]),
    ("frequency_penalty", [0, -2, 2.0, 0.1, None], [2.1, -2.1, float("nan"), False, "0", []]),
    ("presence_penalty", [0, -2, 2.0, 0.1, None], [2.1, -2.1, float("inf"), True, "0", {}]),
    ("repetition_penalty", [1, 0.01, 1.1, 100, None], [0, -1, 100.1, float("nan"), True, "1"]),
    (
        "logit_bias",
        [{}, {"0": -100, "50256": 0.5}, {str(i): 1 for i in range(300)}, None],
        [
            [],
            "5",
            {"a": 1},
            {"-1": 1},
            {"07": 1},
            {"٣": 1},
            {"": 1},
            {"1": 101},
            {"1": float("nan")},
            {"1": True},
            {"1": "1"},
            {"1": None},
            {str(i): 1 for i in range(301)},
        ],
    ),
    ("stop", ["a", ["a"], [], ["a"] * 32, None], ["", 3, {}, ["a"] * 33, "a" * 1025, True]),
    ("stop_token_ids", [[], [0, 5], None], [3, "3", {}, [0] * 33]),
    ("priority", [0, -5, 2**31 - 1, None], [1.5, True, "1", 2**31]),
    ("cache_salt", ["tenant", None], ["", 3, "a" * 1025]),
    ("timeout", [5, 0.5, None], [0, -1, float("inf"), float("nan"), True, "5"]),
    ("queue_timeout", [5, 0.5, None], [0, -1, float("inf"), float("nan"), True, "5"]),
    ("user", ["somebody", "", None], [3, {}, "a" * 1025]),
    ("safety_identifier", ["somebody", None], [3, [], "a" * 1025]),
    ("ignore_eos", [True, False, None], [1, "yes"]),
    ("stream_options", [None], [{}, {"include_usage": True}, 3]),
    (
        "response_format",
        [
            {"type": "text"},
            {"type": "json_object", "json_schema": None},
            {"type": "json_schema", "json_schema": {"name": "a"}},
            {
                "type": "json_schema",
                "json_schema": {"name": "A-b_9" * 12, "schema": {}, "strict": True, "description": "b"},
            },
            {"type": "json_schema", "json_schema": {"name": "a", "schema": None, "strict": None}},
            None,
        ],
        ["text", [], 3, True],
    ),
    (
        "structured_outputs",
        [
            {"json": {"type": "integer"}, "regex": None},
            {"json": '{"type": "integer"}'},
            {"regex": "a+"},
            {"choice": ["a", "", "a"]},
            {"grammar": 'start: "a"'},
            {"json_object": True, "disable_any_whitespace": False, "structural_tag": None},
            None,
        ],
        [{}, {"regex": None}, {"regex": "a", "choice": ["b"]}, {"json": {}, "json_object": True}, "a", [], 3],
    ),
]
MORE_VALUES: list[tuple[Kind, str, list[Any], list[Any]]] = [
    (ChatRequest, "max_completion_tokens", [1, 10**9, None], [0, -1, 1.0, True, "1"]),
    (ChatRequest, "logprobs", [True, False, None], [0, 1, "true", []]),
    (ChatRequest, "top_logprobs", [0, None], [1, 20, 21, -1, 0.0, True, False, "1"]),
    (ChatRequest, "messages", [[USER] * 2048], [[], None, {}, "Hi", [USER] * 2049]),
    (CompletionRequest, "logprobs", [0, 1, 20, None], [-1, 21, 1.0, True, False, "1"]),
    (
        CompletionRequest,
        "prompt",
        ["a", ["a"], ["a", "b"], [1], [0, 1], [[1]], [[1], [2, 3]], ["a"] * MAX_CHOICES],
        ["", [], None, 3, {}, True, ["a"] * (MAX_CHOICES + 1), [[1]] * (MAX_CHOICES + 1)],
    ),
]
NEUTRAL: list[tuple[str, list[Any], list[Any]]] = [
    ("min_tokens", [0, None], [1, False]),
    ("skip_special_tokens", [True, None], [False, 1]),
    ("include_stop_str_in_output", [False, None], [True, 0]),
]
MORE_NEUTRAL: list[tuple[Kind, str, list[Any], list[Any]]] = [
    (ChatRequest, "tools", [[], None], [[{"type": "function", "function": {"name": "f"}}]]),
    (ChatRequest, "tool_choice", ["none", None], ["auto", "required", {"type": "function"}]),
    (ChatRequest, "functions", [[], None], [[{"name": "f"}]]),
    (ChatRequest, "function_call", ["none", None], ["auto", {"name": "f"}]),
    (ChatRequest, "modalities", [["text"], None], [["text", "audio"], []]),
    (ChatRequest, "audio", [None], [{"voice": "alloy", "format": "wav"}]),
    (ChatRequest, "reasoning_effort", ["none", None], ["low", "high"]),
    (ChatRequest, "verbosity", ["medium", None], ["low", "high"]),
    (ChatRequest, "web_search_options", [None], [{}]),
    (ChatRequest, "moderation", [None], [{}]),
    (CompletionRequest, "echo", [False, None], [True]),
    (CompletionRequest, "suffix", ["", None], ["the end"]),
    (CompletionRequest, "best_of", [1, None], [2, 0]),
]
HARMLESS: list[tuple[Kind, str]] = [
    *(
        (kind, field)
        for kind in KINDS
        for field in [
            "store",
            "metadata",
            "service_tier",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
        ]
    ),
    (ChatRequest, "parallel_tool_calls"),
    (ChatRequest, "prediction"),
]
CASES = [
    *((kind, field, right, wrong) for kind in KINDS for field, right, wrong in [*VALUES, *NEUTRAL]),
    *MORE_VALUES,
    *MORE_NEUTRAL,
]

UNSERVED = {(kind, field) for kind, field, *_ in MORE_NEUTRAL} | {
    (kind, field) for kind in KINDS for field, *_ in NEUTRAL
}
