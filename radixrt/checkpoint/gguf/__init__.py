"""GGUF, llama.cpp's files of models: one file has the config, the tokenizer and the weights.

    FILE.gguf  --file.read_gguf-->  GgufFile    metadata, and where each tensor is
    GgufFile   --config-->          config.json, generation_config.json
    GgufFile   --vocabulary-->      tokenizer.json, tokenizer_config.json
    FILE.gguf  --folder.unpacked--> a checkpoint folder with these and a link to the file, in the user's cache

Everything else reads that folder as it reads other checkpoints; only the weights are read from the file itself
(`worker.model.weights.gguf`).
"""
