"""Structured output: requests whose tokens a grammar constrains, such as a JSON schema's."""
