"""Text generation with a real model, every attention through the paged backend (`tilewright demo`).

Read in this order: model.py (a Llama that hands q, k, v to an attention backend), engine.py (a continuous batch over
the pools), compare.py (how pools, backend, model and engine are put together, and timed), sdpa.py (the same interface
over dense torch attention), gguf_model.py (the file and its tokenizer), command.py (what is asked and printed).
"""
