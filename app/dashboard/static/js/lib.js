// The libraries under one name: Preact with its hooks (the module of htm has both), htm, and uPlot (a classic script, which
// defines a global).

import htm from "../vendor/htm.module.js";
import { h } from "../vendor/htm-preact-standalone.module.js";

export { Component, render, useEffect, useLayoutEffect, useMemo, useRef, useState } from "../vendor/htm-preact-standalone.module.js";

// htm keeps the elements of parts without values, and such an element keeps the tree in which it stood first, with all that
// was ever removed from it: rows that come and go would fill the memory. `this[0] = 3` tells htm to keep nothing.
export const html = htm.bind(function element(...parts) {
  this[0] = 3;
  return h(...parts);
});

export const uPlot = globalThis.uPlot;
