// Values as people read them.

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0) return "−" + seconds(-value);
  if (value < 5e-7) return "0";
  for (const [limit, factor, unit] of [[9.995e-4, 1e6, "µs"], [0.9995, 1e3, "ms"], [99.95, 1, "s"]]) {
    if (value < limit) {
      const scaled = value * factor;
      return `${scaled.toFixed(scaled < 9.995 ? 2 : scaled < 99.95 ? 1 : 0)} ${unit}`;
    }
  }
  const minutes = Math.floor(Math.round(value) / 60);
  if (minutes < 100) return `${minutes} min ${String(Math.round(value) % 60).padStart(2, "0")} s`;
  return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
}

export const ns = (value) => seconds(value / 1e9);

// A moment, as time since the start of the job, with as many digits as `step` (ns) can tell apart.
export function moment(at, step) {
  const sign = at < 0 ? "−" : "";
  const whole = Math.abs(at) / 1e9;
  const digits = Math.max(0, Math.min(9, Math.ceil(-Math.log10(step / 1e9) - 1e-9)));
  const rounded = Number(whole.toFixed(digits));
  const hours = Math.floor(rounded / 3600);
  const minutes = Math.floor((rounded % 3600) / 60);
  const rest = (rounded % 60).toFixed(digits).padStart(digits ? digits + 3 : 2, "0");
  return hours ? `${sign}${hours}:${String(minutes).padStart(2, "0")}:${rest}` : `${sign}${minutes}:${rest}`;
}

export function bytes(count) {
  if (!count) return "–";
  if (count < 1024) return `${count} B`;
  let value = count;
  for (const unit of ["KiB", "MiB", "GiB", "TiB"]) {
    value /= 1024;
    if (value < 1023.95 || unit === "TiB") return `${value.toFixed(1)} ${unit}`;
  }
  return "";
}

export const count = (value) => (value ?? 0).toLocaleString("en");

export function percent(share) {
  if (share === null || share === undefined) return "–";
  return `${(share * 100).toFixed(share > 0.9995 ? 3 : 2)} %`;
}
