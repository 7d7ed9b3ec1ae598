"""Tests of llama.cpp's server that ask for what this one does not have, and why: for llama_server_suite.py.

A pattern is one of fnmatch for file::test[case]. A test that passes all the same counts as passed.
"""

_IMAGES = "sends images, which this server refuses with 400, or needs a model that sees them"
_TEMPLATES = "names a template that is built into llama.cpp; here it is a file"
_VERBOSE = "reads the prompt in __verbose; here it is /apply-template that tells it"
_ROUTER = "starts a server without a model"
_CORS = "asserts that pages of any site may send requests; here --cors-origin names those that may"
_BERT = "needs bert-bge-small, a model of embeddings"

NOT_OURS = {
    "basic::test_server_multiple_addresses": "gives --host several addresses",
    "basic::test_server_slots": "turns /slots off; here it is always there, for clients with the key",
    "basic::test_no_ui": "turns the page off",
    "basic::test_server_model_aliases_and_tags": "gives a model several names, and tags",
    "chat_completion::test_chat_template": _TEMPLATES,
    "chat_completion::test_apply_chat_template": _TEMPLATES,
    "chat_completion::test_chat_template_continue_final_message_mutual_exclusion": _TEMPLATES,
    "chat_completion::test_chat_template_continue_final_message_vllm_compat": _VERBOSE,
    "chat_completion::test_chat_template_assistant_prefill*": _VERBOSE,
    "chat_completion::test_verbose_debug": _VERBOSE,
    "chat_completion::test_return_progress*": "reads return_progress, which has no effect here",
    "compat_anthropic::test_anthropic_*image*": _IMAGES,
    "compat_anthropic::test_anthropic_vision*": _IMAGES,
    "compat_anthropic::test_anthropic_empty_messages": "asserts that no message at all is answered",
    "compat_oai_responses::test_responses_stream_with_llama_telemetry": "reads progress in events",
    "ctx_shift::test_ctx_shift_enabled": "starts the server with --context-shift; here no text is ever cut",
    "ctx_shift::test_ctx_shift_disabled_long_prompt": "asserts llama.cpp's words for a long prompt",
    "embedding::*": _BERT,
    "security::test_access_static_assets*": "reads files of llama.cpp's page",
    "security::test_cors_options*": _CORS,
    "security::test_cors_origins*": _ROUTER,
    "security::test_cors_proxy*": "asks for a proxy to other servers",
    "security::test_local_media_file*": _IMAGES,
    "slot_save::test_slot_restore_legacy_token_list": "rewrites a file in llama.cpp's format of saved slots",
    "slot_save::*image*": _IMAGES,
    "slot_save::*media*": _IMAGES,
    "slot_save::*multimodal*": _IMAGES,
    "tokenize::test_tokenize_with_bos": "asserts stories260K's BOS token; SmolLM2 begins no text with one",
}

# files of the suite that are not run: all of their tests ask for something else
NOT_RUN = {
    "compat_gcp": "the form of Google's Vertex AI",
    "infill": "POST /infill; /v1/completions fills in with `suffix`",
    "kv_keep_only_active": "options of llama.cpp's own cache of prompts",
    "lora": "adapters that each request chooses",
    "mcp_servers": "MCP servers, whose tools llama.cpp's server runs",
    "metrics": "llama.cpp's names of metrics; here they are ours and vLLM's",
    "proxy": "a proxy to other servers",
    "rerank": "a model that ranks texts",
    "router": "several models behind one server",
    "sleep": "a server that unloads its model",
    "speculative": "options of llama.cpp's own drafts",
    "stream": "answers that are kept and sent again, behind a router",
    "tools_builtin": "tools that the server runs",
    "vision_api": "images",
}
