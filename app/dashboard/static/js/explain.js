// What the router's answer to `explain` says of a decision: the ranking as a table, and the formula with its numbers.

import { known } from "./format.js";

const NAME = /\bw\.(\w+)|\b([A-Za-z_]\w*)\b/g;

export const six = (value) => (known(value) ? String(Number(value.toPrecision(6))) : "–");

// The policy's formula with this candidate's numbers. A name without a number stays as it is, and a term that an engine does
// not report must not take the number of the weight that has the same name. `sluice explain` prints the same.
export function withNumbers(ranked, policy) {
  const weights = new Set([...policy.formula.matchAll(NAME)].map((match) => match[1]).filter(Boolean));
  return policy.formula.replace(NAME, (all, weight, name) => {
    let value;
    if (weight !== undefined) value = policy.params?.[weight];
    else if (name === "cost") return six(ranked.cost);
    else {
      value = ranked.terms?.[name];
      if (value === undefined && !weights.has(name)) value = policy.params?.[name];
    }
    if (!known(value)) return all;
    return value < 0 ? `(${six(value)})` : six(value);
  });
}

// The ranked candidates to which the policy applied its formula: those with the terms of the chosen one that the formula names.
export function valued(chosen, policy) {
  const named = new Set([...policy.formula.matchAll(NAME)].map((match) => match[2]).filter(Boolean));
  const best = chosen.ranking.find((one) => one.worker === chosen.worker);
  const wanted = Object.keys(best?.terms ?? {}).filter((name) => named.has(name));
  return chosen.ranking.filter((one) => wanted.every((name) => name in (one.terms ?? {})));
}

// The names of all terms of a ranking, in the order in which they first occur.
export const termsOf = (ranking) => [...new Set(ranking.flatMap((one) => Object.keys(one.terms ?? {})))];

export function stageOf(decision) {
  if (decision.action === "RouteDecode") return "decode";
  if (decision.colocated) return decision.degraded ? "prefill and decode (no prefill engine)" : "prefill and decode";
  return "prefill";
}
