"""How the architectures of GGUF files map to Hugging Face models, one module for each."""
