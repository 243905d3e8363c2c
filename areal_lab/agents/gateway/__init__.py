"""The gateway: an inference API for unmodified agents that records the sampled tokens.

    agent -- OpenAI chat, OpenAI responses, Anthropic messages --> Call --> Conversation --> engines

Tokens, templates and engines are behind `calls.Conversation`. May import the messages of `agents`;
imported by its conversations, `hosting`, and the workflow `agent`.
"""
