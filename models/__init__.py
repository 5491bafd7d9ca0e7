"""Architectures beside LLaMA and Mixtral, a file each. Without it only these two run."""

# file, name in config.json, `model_type` there, `general.architecture` of GGUF files
TABLE = (
    ("qwen", "Qwen2ForCausalLM", "qwen2", "qwen2"),
    ("qwen", "Qwen2MoeForCausalLM", "qwen2_moe", "qwen2moe"),
    ("qwen", "Qwen3ForCausalLM", "qwen3", "qwen3"),
    ("qwen", "Qwen3MoeForCausalLM", "qwen3_moe", "qwen3moe"),
    ("mimo", "MiMoForCausalLM", "mimo", ""),
    ("gemma3", "Gemma3ForCausalLM", "gemma3_text", "gemma3"),
    ("gemma4", "Gemma4ForCausalLM", "gemma4_text", "gemma4"),
    ("qwen3_5", "Qwen3_5ForCausalLM", "qwen3_5_text", "qwen35"),
    ("qwen3_5", "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", "qwen35moe"),
    ("qwen3_next", "Qwen3NextForCausalLM", "qwen3_next", "qwen3next"),
    ("lfm2", "Lfm2ForCausalLM", "lfm2", "lfm2"),
    ("lfm2", "Lfm2MoeForCausalLM", "lfm2_moe", "lfm2moe"),
    ("glm4", "Glm4ForCausalLM", "glm4", "glm4"),
    ("glm4_moe", "Glm4MoeForCausalLM", "glm4_moe", "glm4moe"),
    ("gpt_oss", "GptOssForCausalLM", "gpt_oss", "gpt-oss"),
    ("smollm3", "SmolLM3ForCausalLM", "smollm3", "smollm3"),
    ("phi3", "Phi3ForCausalLM", "phi3", "phi3"),
    ("olmo2", "Olmo3ForCausalLM", "olmo3", ""),
    ("granite", "GraniteForCausalLM", "granite", "granite"),
    ("granite", "GraniteMoeHybridForCausalLM", "granitemoehybrid", ""),
    ("olmo2", "Olmo2ForCausalLM", "olmo2", "olmo2"),
)
NEEDS = ("files",)
ADDS = {
    "operators": {
        **{name: f"models.recurrent:{name}" for name in ("delta_rule", "short_conv")},
        **{
            name: f"models.operators:{name}"
            for name in ("clamped_swiglu", "geglu", "sliding", "soft_cap")
        },
    },
    "rope": {"none": "models.smollm3:no_turns"},
    "step": {"WindowAttend": "models.steps:WindowAttend"},
    "config": {"qwen": "models.mixtures:Qwen"},
    "architecture": {name: f"models.{file}" for file, name, _, _ in TABLE},
    "model type": {kind: name for _, name, kind, _ in TABLE},
    "gguf architecture": {gguf: name for _, name, _, gguf in TABLE if gguf},
}
