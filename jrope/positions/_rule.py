"""A family's rule as the kernels read it: one float64 per fact, named by its place."""

# An id that no token has.
NO_TOKEN = -(2**31)
# Tokens of a prompt, columns of a step, patches of a call: six times the longest
# context that any model has. More is a mistake, or an attack on memory.
MOST_TOKENS = 2**26

# Token ids, NO_TOKEN where the family has none.
IMAGE, VIDEO, AUDIO = 0, 1, 2
# What starts and ends a video, where an image id between the two means a video frame;
# and the tokens round audio in video: the two that start it, the last that ends it.
VIDEO_OPENS, VIDEO_CLOSES = 3, 4
VISION_OPENS, AUDIO_OPENS, VISION_CLOSES = 5, 6, 7
# Sizes: patches per token along rows and columns, and along time; one more token a row.
MERGE, TEMPORAL_MERGE, EXTRA_COLUMN = 8, 9, 10
# Whose frames are grids of their own, see FRAME_STYLES.
PER_FRAME = 11
# Where a grid begins, see LAYOUTS; whether grids without tokens are to be decoded.
LAYOUT, DECODES_IMAGES = 12, 13
# Time: see TIMES; positions per second, seconds per frame where none are given (NaN:
# that is an error), step between the frames of an image.
TIME, RATE, DEFAULT_SECONDS, IMAGE_RATE = 14, 15, 16, 17
# Audio: tokens of a length (see AUDIO_RULES), positions in a video (see AV_STYLES).
AUDIO_TOKENS, AUDIO_IN_VIDEO, AUDIO_CLOSES = 18, 19, 20
ROW_T, ROW_H, ROW_W, ROW_INDEX, FRACTIONAL = 21, 22, 23, 24, 25
SIZE = 26

# A grid begins at the next text position on every axis; or does so in time only, rows
# and columns counting from 0; or has its ordinal as the time, text keeping its index.
LAYOUTS = ("cursor", "cursor_in_time", "ordinal")
FROM_CURSOR, CURSOR_IN_TIME, ORDINAL = range(3)

FRAME_STYLES = ("none", "video", "all")
NO_FRAMES, VIDEO_FRAMES, ALL_FRAMES = range(3)

# float32(f) * float32(rate * seconds), or float32(float32(f) * seconds) * rate.
TIMES = ("frame", "rate_times_seconds", "frame_times_seconds")
BY_FRAME, RATE_FIRST, FRAME_FIRST = range(3)

# Tokens of so many feature frames: Qwen2.5-Omni's two convolutions, Qwen3-Omni's three.
AUDIO_RULES = ("none", "two_convolutions", "blocks_of_100")
NO_AUDIO, TWO_CONVOLUTIONS, BLOCKS_OF_100 = range(3)

AV_STYLES = ("none", "chunks", "tokens")
NO_AV, AV_CHUNKS, AV_TOKENS = range(3)

# Flags of one call.
ADVANCE_HF5, CLIP, WITHOUT_AV = 1, 2, 4
