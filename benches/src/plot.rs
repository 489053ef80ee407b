//! Draws a recorded table as an SVG. The plot shows time over size on logarithmic axes.
//!
//! This command makes the plots in `docs/images` from the tables in `benches/results`, so every
//! point is a recorded measurement.

use core::fmt::Write as _;
use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, Result, bail};

const WIDTH: f64 = 960.0;
const HEIGHT: f64 = 520.0;
/// The rectangle of the axes: left, top, right, bottom.
const AXES: [f64; 4] = [80.0, 84.0, 690.0, 450.0];
/// Minimum distance between two labels, in pixels.
const LABEL_STEP: f64 = 20.0;

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Markdown file with recorded tables.
    file: PathBuf,
    /// Text in the heading above the table. The first table after that heading is drawn.
    #[arg(long)]
    table: String,
    /// A column of the table, with the label of its line: NAME or NAME=LABEL. Repeat for each line.
    #[arg(long = "column", required = true)]
    columns: Vec<String>,
    /// Title of the picture.
    #[arg(long)]
    title: String,
    /// Subtitle of the picture: machine and date of the measurement.
    #[arg(long)]
    note: String,
    /// File to write.
    #[arg(long)]
    out: PathBuf,
}

/// The times of one column, by size in bytes.
struct Line {
    label: String,
    points: Vec<(f64, f64)>,
}

pub(crate) fn main(arguments: &Arguments) -> Result<()> {
    let file = &arguments.file;
    let text = fs::read_to_string(file).with_context(|| format!("reading {}", file.display()))?;
    let lines = read(&text, &arguments.table, &arguments.columns)
        .with_context(|| format!("in {}", file.display()))?;
    let source = format!("{}, table: {}", file.display(), arguments.table);
    let picture = draw(&arguments.title, &arguments.note, &source, &lines);
    let out = &arguments.out;
    fs::write(out, picture).with_context(|| format!("writing {}", out.display()))?;
    println!("{}", out.display());
    Ok(())
}

/// Reads `columns` of the first table after the heading that contains `table`.
fn read(text: &str, table: &str, columns: &[String]) -> Result<Vec<Line>> {
    let mut rows = text
        .lines()
        .skip_while(|line| !(line.starts_with('#') && line.contains(table)))
        .skip_while(|line| !line.starts_with('|'))
        .take_while(|line| line.starts_with('|'))
        .map(|line| line.trim_matches('|').split('|').map(str::trim).collect())
        .map(|cells: Vec<&str>| cells);
    let Some(header) = rows.next() else {
        bail!("no table follows a heading that contains {table:?}");
    };
    let rows: Vec<Vec<&str>> = rows.skip(1).collect();
    let mut lines = Vec::new();
    for column in columns {
        let (name, label) = column.split_once('=').unwrap_or((column, column));
        let Some(index) = header.iter().position(|cell| *cell == name) else {
            bail!(
                "no column is named {name:?}; there are {}",
                header.join(", ")
            );
        };
        let mut points = Vec::new();
        for row in &rows {
            let cell = |index: usize| row.get(index).copied().unwrap_or_default();
            let time = cell(index);
            let time = time.parse().with_context(|| format!("{name}: {time:?}"))?;
            points.push((bytes(cell(0))?, time));
        }
        let label = label.to_owned();
        lines.push(Line { label, points });
    }
    Ok(lines)
}

/// Parses a size as the tables print it: `8 B`, `64 KiB`, `1 MiB`.
fn bytes(text: &str) -> Result<f64> {
    let (number, unit) = text.split_once(' ').unwrap_or((text, "B"));
    let scale = match unit {
        "B" => 1.0,
        "KiB" => 1024.0,
        "MiB" => 1024.0 * 1024.0,
        _ => bail!("{text:?} is no size in B, KiB or MiB"),
    };
    let number: f64 = number.parse().with_context(|| format!("size {text:?}"))?;
    Ok(number * scale)
}

fn size(bytes: f64) -> String {
    match bytes {
        bytes if bytes >= 1048576.0 => format!("{} MiB", bytes / 1048576.0),
        bytes if bytes >= 1024.0 => format!("{} KiB", bytes / 1024.0),
        bytes => format!("{bytes} B"),
    }
}

fn time(us: f64) -> String {
    match us {
        us if us >= 1000.0 => format!("{} ms", us / 1000.0),
        us => format!("{us} us"),
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}

/// Colours of the lines, for light and for dark mode.
const COLOURS: [[&str; 2]; 5] = [
    ["#0969da", "#58a6ff"],
    ["#1a7f37", "#3fb950"],
    ["#cf222e", "#ff7b72"],
    ["#9a6700", "#d29922"],
    ["#8250df", "#bc8cff"],
];

const STYLE: &str = r#"
    .bg { fill: #ffffff } .axis { stroke: #57606a } .grid { stroke: #d0d7de; stroke-width: 0.7 }
    text { font: 14px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1f2328 }
    .title { font-weight: 600; font-size: 16px } .small { font-size: 12.5px; fill: #57606a }
    .mid { text-anchor: middle } .end { text-anchor: end } .line { fill: none; stroke-width: 2.2 }
"#;

const STYLE_DARK: &str = r#"
      .bg { fill: #0d1117 } .axis { stroke: #9198a1 } .grid { stroke: #30363d }
      text { fill: #e6edf3 } .small { fill: #9198a1 }
"#;

fn draw(title: &str, note: &str, source: &str, lines: &[Line]) -> String {
    let [left, top, right, bottom] = AXES;
    let points = || lines.iter().flat_map(|line| &line.points);
    let least = points().map(|point| point.1).fold(f64::INFINITY, f64::min);
    let most = points().map(|point| point.1).fold(0.0, f64::max);
    let (low, high) = (least.log10().floor(), most.log10().ceil());
    let first = points().map(|point| point.0).fold(f64::INFINITY, f64::min);
    let last = points().map(|point| point.0).fold(0.0, f64::max);
    let x = |bytes: f64| left + (bytes / first).log2() / (last / first).log2() * (right - left);
    let y = |us: f64| bottom - (us.log10() - low) / (high - low) * (bottom - top);

    let mut svg = String::new();
    let w = &mut svg;
    let _ = writeln!(
        w,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" \
         aria-label=\"{}\">",
        escape(title).replace('"', "&quot;")
    );
    let _ = writeln!(
        w,
        "  <!-- Made by fusewire-benches plot. Source: {source} -->"
    );
    let _ = write!(w, "  <style>{STYLE}");
    for (index, [light, _]) in COLOURS.iter().enumerate() {
        let _ = writeln!(
            w,
            "    .s{index} {{ stroke: {light} }} .f{index} {{ fill: {light} }}"
        );
    }
    let _ = write!(w, "    @media (prefers-color-scheme: dark) {{{STYLE_DARK}");
    for (index, [_, dark]) in COLOURS.iter().enumerate() {
        let _ = writeln!(
            w,
            "      .s{index} {{ stroke: {dark} }} .f{index} {{ fill: {dark} }}"
        );
    }
    let _ = writeln!(w, "    }}\n  </style>");
    let _ = writeln!(
        w,
        "  <rect class=\"bg\" width=\"{WIDTH}\" height=\"{HEIGHT}\"/>"
    );
    let _ = writeln!(
        w,
        "  <text class=\"title\" x=\"{left}\" y=\"32\">{}</text>",
        escape(title)
    );
    let _ = writeln!(
        w,
        "  <text class=\"small\" x=\"{left}\" y=\"54\">{}</text>",
        escape(note)
    );
    let mut decade = low;
    while decade <= high {
        let at = y(10f64.powf(decade));
        let label = time(10f64.powf(decade));
        let _ = writeln!(w, "  <path class=\"grid\" d=\"M{left} {at:.1} H{right}\"/>");
        let _ = writeln!(
            w,
            "  <text class=\"small end\" x=\"{:.1}\" y=\"{:.1}\">{label}</text>",
            left - 8.0,
            at + 4.0
        );
        decade += 1.0;
    }
    for &(bytes, _) in &lines[0].points {
        let at = x(bytes);
        let _ = writeln!(w, "  <path class=\"grid\" d=\"M{at:.1} {top} V{bottom}\"/>");
        let _ = writeln!(
            w,
            "  <text class=\"small mid\" x=\"{at:.1}\" y=\"{:.1}\">{}</text>",
            bottom + 20.0,
            size(bytes)
        );
    }
    let _ = writeln!(
        w,
        "  <path class=\"axis\" fill=\"none\" d=\"M{left} {top} V{bottom} H{right}\"/>"
    );
    let _ = writeln!(
        w,
        "  <text class=\"small mid\" x=\"{:.1}\" y=\"{:.1}\">\
         bytes a rank; time of a call, lower is better</text>",
        f64::midpoint(left, right),
        bottom + 46.0
    );
    for (index, line) in lines.iter().enumerate() {
        let colour = index % COLOURS.len();
        let path: Vec<String> = line
            .points
            .iter()
            .map(|&(bytes, us)| format!("{:.1} {:.1}", x(bytes), y(us)))
            .collect();
        let _ = writeln!(
            w,
            "  <path class=\"line s{colour}\" d=\"M{}\"/>",
            path.join(" L")
        );
        for &(bytes, us) in &line.points {
            let _ = writeln!(
                w,
                "  <circle class=\"f{colour}\" cx=\"{:.1}\" cy=\"{:.1}\" r=\"3.4\">\
                 <title>{}: {us} us</title></circle>",
                x(bytes),
                y(us),
                size(bytes)
            );
        }
    }
    labels(w, lines, right + 14.0, y);
    svg + "</svg>\n"
}

/// Writes the label of each line next to the line's last point, from top to bottom without overlap.
fn labels(w: &mut String, lines: &[Line], x: f64, y: impl Fn(f64) -> f64) {
    let ends = lines.iter().enumerate();
    let mut ends: Vec<(f64, usize)> = ends
        .filter_map(|(index, line)| line.points.last().map(|last| (y(last.1) + 5.0, index)))
        .collect();
    ends.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
    let mut free = f64::NEG_INFINITY;
    for (wanted, index) in ends {
        let at = wanted.max(free);
        free = at + LABEL_STEP;
        let colour = index % COLOURS.len();
        let label = escape(&lines[index].label);
        let _ = writeln!(
            w,
            "  <text class=\"f{colour}\" x=\"{x:.1}\" y=\"{at:.1}\">{label}</text>"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "# Results

| a | b |
|---|---|
| x | 9 |

### 2 ranks, near

Median us.

| bytes | MPI | ours |
|---|---|---|
| 8 B | 0.25 | 0.125 |
| 1 KiB | 2 | 1 |
| 2 MiB | 4000 | 900 |
";

    fn columns(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn the_table_after_the_heading_is_read() {
        let lines = read(TABLE, "2 ranks", &columns(&["ours=This & that", "MPI"])).unwrap();
        assert_eq!(lines[0].label, "This & that");
        assert_eq!(
            lines[0].points,
            [(8.0, 0.125), (1024.0, 1.0), (2097152.0, 900.0)]
        );
        assert_eq!(lines[1].points[2], (2097152.0, 4000.0));
    }

    #[test]
    fn what_is_missing_is_named() {
        let error = |table, column| {
            let read = read(TABLE, table, &columns(&[column]));
            read.err().expect("an error").to_string()
        };
        assert!(error("3 ranks", "MPI").contains("3 ranks"));
        assert!(error("2 ranks", "NCCL").contains("bytes, MPI, ours"));
    }

    #[test]
    fn every_figure_is_a_point_of_the_picture() {
        let lines = read(TABLE, "2 ranks", &columns(&["MPI", "ours=A < B"])).unwrap();
        let svg = draw("Title", "Note", "results.md", &lines);
        assert_eq!(svg.matches("<circle").count(), 6);
        assert!(svg.contains("2 MiB: 900 us"));
        assert!(svg.contains("A &lt; B</text>"));
        assert!(svg.contains("Source: results.md"));
    }
}
