"""What the figures of a load mean, in words for the help and for readers of reports.

Knows words only; `measure.py` computes.
"""

METRICS = ("ttft", "tpot", "itl", "e2el")
"""Latencies that a report can show."""

DEFINITIONS = """\
what the figures mean:
  chunk    what one read of the socket brings with text in it. A server may put several tokens
           into one event, and several events may arrive at once: all of that is one chunk.
  TTFT     time to first token: from sending to the first chunk.
  ITL      inter-token latency: the gaps between the chunks of a stream, all streams together.
           With several tokens per chunk, ITL is long and rare, and no measure of speed.
  TPOT     time per output token: (last chunk - first chunk) / (tokens - 1) of each request, with
           the tokens that the server's `usage` counts, however they were cut into chunks. Tokens
           beside the first one in the first chunk shorten it; an answer in one chunk has none.
  E2EL     end-to-end latency: from sending to the end of the stream.
  intended: the arrival process says when a request is due. A client that is late, or waits for a
           place under --max-concurrency, would hide what users suffer, so TTFT and E2EL are
           also measured from that moment. Goodput is judged by these; a request without a figure
           (no TPOT with one token, say) misses no limit of it.
  steady state: from the end of the first good request to the sending of the last one: neither the
           filling nor the draining of the server.
  percentiles: linear between the two nearest values, as numpy has them; `std` is that of the
           population.
  Latencies are those of requests with outcome `ok`; the other outcomes are counted beside them.
"""
