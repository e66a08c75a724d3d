-- wrk script: POSTs the request bodies of a file in turn and prints its summary as one JSON line.
-- wrk -s wrk.lua URL -- PATH BODIES_FILE [HEADER...]      (one JSON body a line; further header lines)
-- Answers are counted by wrk's own HTTP parser (a whole chunked body, status 2xx or 3xx); their text is not looked at.

local requests = {}
local turn = 0

function init(args)
  local headers = { ["Content-Type"] = "application/json" }
  for i = 3, #args do
    local name, value = args[i]:match("^([^:]+): (.*)$")
    headers[name] = value
  end
  for body in io.lines(args[2]) do
    requests[#requests + 1] = wrk.format("POST", args[1], headers, body)
  end
end

function request()
  turn = turn % #requests + 1
  return requests[turn]
end

function done(summary, latency, _)
  local e = summary.errors
  io.write(string.format(
    '\nWRK {"requests": %d, "duration_us": %d, "bytes": %d, "p50_us": %.1f, "p95_us": %.1f, "p99_us": %.1f, '
      .. '"connect": %d, "read": %d, "write": %d, "status": %d, "timeout": %d}\n',
    summary.requests, summary.duration, summary.bytes, latency:percentile(50), latency:percentile(95),
    latency:percentile(99), e.connect, e.read, e.write, e.status, e.timeout))
end
