// The libraries under one name: Preact with htm (one module) and uPlot (a classic script, which defines a global).
export {
  Component, html, render, useEffect, useLayoutEffect, useMemo, useRef, useState,
} from "../vendor/htm-preact-standalone.module.js";

export const uPlot = globalThis.uPlot;
