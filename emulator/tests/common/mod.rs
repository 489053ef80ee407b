//! Helpers of the integration tests.

#![allow(dead_code, unreachable_pub)] // each test uses some of the helpers

use std::sync::Arc;

use fusewire_emulator::{Buffer, Config, Error, Fault, Gpus, Hang, Kernel, Module};

/// Directives before the first declaration. The text after them starts in line 4.
pub const HEADER: &str = ".version 8.3\n.target sm_90\n.address_size 64\n";

/// Parses a module without the directives of [`HEADER`].
pub fn module(text: &str) -> Arc<Module> {
    match Module::parse(&format!("{HEADER}{text}")) {
        Ok(module) => Arc::new(module),
        Err(error) => panic!("{error}\n{text}"),
    }
}

/// Returns a module with the kernel `k`, which has the body `body` and 64-bit parameters. Before
/// the body, the parameters are in the registers `%in0`, `%in1`, .. The body may use the registers
/// `%p`, `%h`, `%r`, `%d`, `%f`, `%g` with the numbers 0 to 31; `%tid`, `%lane` and `%cta` have the
/// numbers of the thread, lane and block.
pub fn kernel(params: usize, body: &str) -> Arc<Module> {
    module(&kernel_text("k", params, body))
}

/// Returns the text of a kernel of [`kernel`].
pub fn kernel_text(name: &str, params: usize, body: &str) -> String {
    let list: Vec<String> = (0..params).map(|at| format!(".param .u64 p{at}")).collect();
    let loads: Vec<String> = (0..params)
        .map(|at| format!(".reg .b64 %in{at}; ld.param.u64 %in{at}, [p{at}];"))
        .collect();
    format!(
        ".visible .entry {name}({}) {{ .reg .pred %p<32>; .reg .b16 %h<32>; .reg .b32 %r<32>; \
         .reg .b64 %d<32>; .reg .f32 %f<32>; .reg .f64 %g<32>; \
         .reg .b32 %thread, %lane, %cta; {} \
         mov.u32 %thread, %tid.x; mov.u32 %lane, %laneid; mov.u32 %cta, %ctaid.x;\n{body}\n}}\n",
        list.join(", "),
        loads.join(" "),
    )
}

/// Returns the line of the first occurrence of `part` in the text of a module without
/// [`HEADER`].
pub fn line_of(text: &str, part: &str) -> u32 {
    let at = text.find(part).expect("the text has the part");
    text[..at].matches('\n').count() as u32 + 4
}

/// Executes kernel `k` of a module in one block. Returns the 32-bit output, `words` numbers that
/// are 0 initially. The kernel has one parameter, the address of the output.
pub fn run(module: &Arc<Module>, threads: u32, words: usize) -> Vec<u32> {
    let gpus = Gpus::default();
    let out = gpus.allocate(0, 4 * words);
    let kernel = Kernel::new(module, "k").threads(threads).arg(&out);
    if let Err(error) = gpus.run(&[kernel]) {
        panic!("{error}");
    }
    out.read_u32()
}

/// Executes the body of a kernel as [`run`] does.
pub fn run_body(body: &str, threads: u32, words: usize) -> Vec<u32> {
    run(&kernel(1, body), threads, words)
}

/// Returns the fault of kernel `k`, which has the address of a buffer of 256 bytes as parameter.
pub fn fault(module: &Arc<Module>, threads: u32) -> Arc<Fault> {
    let gpus = Gpus::default();
    let out = gpus.allocate(0, 256);
    let kernel = Kernel::new(module, "k").threads(threads).arg(&out);
    expect_fault(gpus.run(&[kernel]))
}

/// Returns the fault of the result of launches.
pub fn expect_fault<T: core::fmt::Debug>(result: Result<T, Error>) -> Arc<Fault> {
    match result {
        Err(Error::Fault(fault)) => fault,
        other => panic!("expected a fault: {other:?}"),
    }
}

/// Returns the hang of the result of launches.
pub fn expect_hang<T: core::fmt::Debug>(result: Result<T, Error>) -> Arc<Hang> {
    match result {
        Err(Error::Hang(hang)) => hang,
        other => panic!("expected a hang: {other:?}"),
    }
}

/// Returns the hang of kernel `k`, which has the address of a buffer of 4096 bytes as parameter.
pub fn hang(module: &Arc<Module>, threads: u32) -> Arc<Hang> {
    let gpus = Gpus::new(impatient());
    let out = gpus.allocate(0, 4096);
    let kernel = Kernel::new(module, "k").threads(threads).arg(&out);
    expect_hang(gpus.run(&[kernel]))
}

/// Returns a configuration in which launches without progress fail after 10 virtual milliseconds.
pub fn impatient() -> Config {
    Config {
        hang_after_virtual: core::time::Duration::from_millis(10),
        ..Config::default()
    }
}

/// Writes 32-bit numbers to a buffer.
pub fn write_u32(buffer: &Buffer, values: &[u32]) {
    let bytes: Vec<u8> = values.iter().flat_map(|it| it.to_le_bytes()).collect();
    buffer.write(&bytes);
}

/// Returns the size in bytes of a register type.
fn bytes(kind: &str) -> u32 {
    match kind {
        "pred" => 4,
        _ => {
            kind.trim_start_matches(|c: char| !c.is_ascii_digit())
                .parse::<u32>()
                .unwrap()
                / 8
        }
    }
}

/// Executes an instruction once for each case, and returns the 64-bit results. The instruction
/// uses the registers `%d` of type `result`, and `%s0`, `%s1`, .. of the types `sources`; types are
/// `pred`, `b16`, `b32` and `b64`. Predicates are 0 or 1.
pub fn evaluate(instruction: &str, result: &str, sources: &[&str], cases: &[Vec<u64>]) -> Vec<u64> {
    let mut text = String::from(
        ".visible .entry k(.param .u64 in, .param .u64 out) {\n\
         .reg .b32 %t, %one; .reg .b64 %in, %out, %o; .reg .pred %q<4>;\n\
         .reg .b16 %h<8>; .reg .b32 %r<8>; .reg .b64 %l<8>;\n\
         ld.param.u64 %in, [in]; ld.param.u64 %out, [out]; mov.u32 %t, %tid.x;\n\
         mov.u32 %one, %ctaid.x; mad.lo.u32 %t, %one, 256, %t;\n\
         mul.wide.u32 %o, %t, 32; add.u64 %in, %in, %o;\n\
         mul.wide.u32 %o, %t, 8; add.u64 %out, %out, %o;\n",
    );
    text += &format!(".reg .{result} %d;\n");
    for (at, kind) in sources.iter().enumerate() {
        text += &format!(".reg .{kind} %s{at};\n");
        text += &match *kind {
            "pred" => format!(
                "ld.global.u32 %one, [%in+{}]; setp.ne.u32 %s{at}, %one, 0;\n",
                8 * at
            ),
            _ => format!("ld.global.{kind} %s{at}, [%in+{}];\n", 8 * at),
        };
    }
    text += instruction;
    text += &match result {
        "pred" => "\nselp.u32 %one, 1, 0, %d; st.global.u32 [%out], %one;\nret;\n}\n".to_owned(),
        _ => format!("\nst.global.{result} [%out], %d;\nret;\n}}\n"),
    };
    let module = module(&text);
    let gpus = Gpus::default();
    let blocks = cases.len().div_ceil(256);
    let (input, out) = (
        gpus.allocate(0, blocks * 256 * 32),
        gpus.allocate(0, blocks * 256 * 8),
    );
    let mut words = vec![0u64; blocks * 256 * 4];
    for (at, case) in cases.iter().enumerate() {
        words[at * 4..at * 4 + case.len()].copy_from_slice(case);
    }
    let encoded: Vec<u8> = words.iter().flat_map(|it| it.to_le_bytes()).collect();
    input.write(&encoded);
    let kernel = Kernel::new(&module, "k")
        .blocks(blocks as u32)
        .threads(256)
        .arg(&input)
        .arg(&out);
    if let Err(error) = gpus.run(&[kernel]) {
        panic!("{instruction}: {error}");
    }
    let bytes = out.read();
    let results = bytes
        .as_chunks::<8>()
        .0
        .iter()
        .map(|it| u64::from_le_bytes(*it));
    results.take(cases.len()).collect()
}

/// Checks an instruction of [`evaluate`] against a function of the source operands.
pub fn check(
    instruction: &str,
    result: &str,
    sources: &[&str],
    cases: &[Vec<u64>],
    expected: impl Fn(&[u64]) -> u64,
) {
    let results = evaluate(instruction, result, sources, cases);
    for (case, got) in cases.iter().zip(results) {
        let want = expected(case);
        assert_eq!(
            got, want,
            "{instruction} of {case:#x?}: {got:#x}; expected {want:#x}"
        );
    }
}

/// Returns the mask of the bits of a type such as `u16`.
pub fn mask(kind: &str) -> u64 {
    match kind {
        "pred" => 1,
        _ => u64::MAX >> (64 - 8 * bytes(kind)),
    }
}

/// Returns the width of a type in bits.
pub fn bits(kind: &str) -> u32 {
    kind[1..].parse().expect("a type is a letter and a width")
}

/// Returns the register type of a type.
pub fn register(kind: &str) -> &'static str {
    match bits(kind) {
        64 => "b64",
        32 => "b32",
        _ => "b16",
    }
}

/// Returns the number that bits of a type represent.
pub fn number(kind: &str, value: u64) -> i128 {
    let bits = bits(kind);
    let value = value & mask(kind);
    if kind.starts_with('s') && value >> (bits - 1) != 0 {
        i128::from(value) - (1 << bits)
    } else {
        i128::from(value)
    }
}

/// A generator of pseudo-random numbers: xorshift64* (Vigna, 2016).
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    /// Returns the next number.
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
}

/// Returns numbers of `bits` bits: limits, powers of two and their neighbours, random numbers.
pub fn interesting(bits: u32) -> Vec<u64> {
    let all = u64::MAX >> (64 - bits);
    let mut random = Random(0x1234_5678_9abc_def1);
    let mut values = vec![0, 1, 2, 3, 5, 7, 10, 100];
    for shift in [bits / 4, bits / 2 - 1, bits / 2, bits - 2, bits - 1] {
        let power = 1u64 << shift;
        values.extend([power - 1, power, power + 1, power.wrapping_neg() & all]);
    }
    values.extend([all, all - 1, all - 2, 0xaaaa_aaaa_aaaa_aaaa & all]);
    values.extend((0..6).map(|at| random.next() >> (at * 5) & all));
    values.dedup();
    values
}

/// Returns all pairs of the numbers of [`interesting`].
pub fn pairs(bits: u32) -> Vec<Vec<u64>> {
    let values = interesting(bits);
    let mut pairs = Vec::new();
    for a in &values {
        pairs.extend(values.iter().map(|b| vec![*a, *b]));
    }
    pairs
}

/// Returns all pairs of the numbers of [`interesting`], each with a third number.
pub fn triples(bits: u32) -> Vec<Vec<u64>> {
    let thirds = interesting(bits);
    let mut cases = pairs(bits);
    for (at, case) in cases.iter_mut().enumerate() {
        case.push(thirds[(at * 7 + at / thirds.len()) % thirds.len()]);
    }
    cases
}

/// A thread of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spot {
    /// Number of the launch.
    pub launch: u32,
    /// Number of the device.
    pub device: u32,
    /// Number of the block in the grid.
    pub block: u32,
    /// Number of the thread in the block.
    pub thread: u32,
}

/// Relations of the threads of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// On different devices.
    Devices,
    /// In different launches on one device.
    Launches,
    /// In different blocks of a launch.
    Blocks,
    /// In different warps of a block.
    Warps,
    /// In different lanes of a warp.
    Lanes,
}

impl Place {
    /// All relations.
    pub const ALL: [Self; 5] = [
        Self::Devices,
        Self::Launches,
        Self::Blocks,
        Self::Warps,
        Self::Lanes,
    ];

    /// Returns the n-th thread.
    pub fn spot(self, number: u32) -> Spot {
        let mut spot = Spot {
            launch: 0,
            device: 0,
            block: 0,
            thread: 0,
        };
        match self {
            Self::Devices => (spot.launch, spot.device) = (number, number),
            Self::Launches => spot.launch = number,
            Self::Blocks => spot.block = number,
            Self::Warps => spot.thread = 32 * number,
            Self::Lanes => spot.thread = number,
        }
        spot
    }

    /// Returns the narrowest scope that contains all threads.
    pub fn scope(self) -> &'static str {
        match self {
            Self::Devices => "sys",
            Self::Launches | Self::Blocks => "gpu",
            Self::Warps | Self::Lanes => "cta",
        }
    }
}

/// Returns the text of a kernel [`kernel_text`] whose threads `spots` execute `codes`. Other
/// threads exit. Each code starts in a line of its own, and may use the label `LOOP`.
pub fn program_text(params: usize, start: &str, parts: &[(Spot, String)]) -> String {
    let mut body = format!("{start}\n");
    for (at, (spot, _)) in parts.iter().enumerate() {
        let Spot { block, thread, .. } = spot;
        body += &format!(
            "setp.eq.u32 %p31, %cta, {block}; setp.eq.and.u32 %p31, %thread, {thread}, %p31;\n\
             @%p31 bra PART{at};\n"
        );
    }
    body += "bra END;\n";
    for (at, (_, code)) in parts.iter().enumerate() {
        body += &format!(
            "PART{at}:\n{}\nbra END;\n",
            code.replace("LOOP", &format!("LOOP{at}"))
        );
    }
    kernel_text("k", params, &(body + "END: ret;"))
}

/// Returns the launches of the threads of a program, each as a kernel without arguments, with its
/// text.
pub fn launches(params: usize, start: &str, parts: &[(Spot, String)]) -> Vec<(Kernel, String)> {
    let count = parts.iter().map(|(spot, _)| spot.launch + 1).max();
    let launch = |number| {
        let parts: Vec<_> = parts
            .iter()
            .filter(|(spot, _)| spot.launch == number)
            .cloned()
            .collect();
        let most = |f: fn(&Spot) -> u32| parts.iter().map(|(spot, _)| f(spot) + 1).max();
        let text = program_text(params, start, &parts);
        let kernel = Kernel::new(&module(&text), "k")
            .device(parts[0].0.device)
            .blocks(most(|it| it.block).expect("a launch has a thread"))
            .threads(most(|it| it.thread).expect("a launch has a thread"));
        (kernel, text)
    };
    (0..count.unwrap_or(0)).map(launch).collect()
}
