"""The tokens of Lumina-DiMOO, which are constants in the authors' code."""

# A place whose code is not known, and what follows each row of codes.
MASK, ROW_END = 126_336, 126_084
BEGIN_OF_IMAGE, END_OF_IMAGE = 126_349, 126_350
BEGIN_OF_ANSWER, END_OF_ANSWER = 126_354, 126_355
# The prompt of the branch without a prompt.
UNCONDITIONAL = 126_351
# Code 0 of the image tokenizer, which follows all text tokens.
FIRST_CODE = 126_356
NUM_CODES = 8192
# What the text tokenizer must have, each as one token.
TAGS = ("<system>", "</system>", "<user>", "</user>")
