"""The shapes of OpenAI's API: what requests may hold, and how answers are written and streamed."""
