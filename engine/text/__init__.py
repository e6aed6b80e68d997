"""Text in and out: tokenizers and their files, detokenizing, stop strings, chat templates."""
