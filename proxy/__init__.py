"""The engine: it runs the pipeline and knows no plugin by name.

exchange    one request and its answer
plugin      one step of the pipeline, made once at start
output      a plugin's mirror image, made for one answer
pipeline    the ordered list of plugins
route       what a request is for: chat_completions, messages, count_tokens or models
format      what a body is written in: openai or messages
dialect     a route's rim: error envelope, framing of events, tail, ping
upstream    a server that speaks Messages
deployment  a model at an upstream
event       one event of a streamed answer
breakpoint  a cache_control mark
provider    whoever runs an upstream
answer      what goes back to the client
"""
