//! Waits and writes of streams order launches.

use std::thread;
use std::time::Instant;

use fusewire_emulator::{Buffer, Comparison, Mark, Module, StreamOperation};

use super::*;

/// Configurations whose launches wait for the host, and that do not order launches of different
/// devices.
fn device_configs() -> impl Iterator<Item = Config> {
    configs().into_iter().map(|config| Config {
        idle: IdleTime::Host,
        order: LaunchOrder::Device,
        ..config
    })
}

/// Waits until the first word of a buffer has a value.
fn wait_for(buffer: &Buffer, value: u32) {
    let start = Instant::now();
    while buffer.read_u32()[0] != value {
        assert!(
            start.elapsed().as_secs() < 60,
            "no kernel has written {value}"
        );
        thread::yield_now();
    }
}

fn wait(flag: &Buffer, comparison: Comparison, value: u32) -> StreamOperation {
    StreamOperation::Wait {
        address: flag.address(),
        comparison,
        value,
    }
}

/// Returns a kernel whose parameters are the data, a flag, and a word that ends it.
fn on_flag(code: &str) -> Arc<Module> {
    kernel(3, &format!("{code}\nret;"))
}

const READ: &str = "ld.global.u32 %r0, [%in0];";

/// A kernel of device 0 writes the data, raises the flag with `raise`, and runs until the kernel of
/// device 1 has read the data.
fn run_after_wait(config: Config, raise: &str, waits: bool) -> Result<(), Error> {
    let gpus = &Gpus::new(config);
    let [data, flag, end] = [(); 3].map(|()| gpus.allocate(0, 8));
    let launch = |module: &Arc<Module>, device| {
        let kernel = Kernel::new(module, "k").device(device);
        kernel.arg(&data).arg(&flag).arg(&end)
    };
    let writer = on_flag(&format!(
        "st.global.u32 [%in0], 1; {raise}
        END: ld.relaxed.sys.global.u32 %r1, [%in2]; setp.eq.u32 %p0, %r1, 0; @%p0 bra END;"
    ));
    let writer = launch(&writer, 0);
    thread::scope(|scope| {
        let running = scope.spawn(move || gpus.run(&[writer]));
        wait_for(&flag, 7);
        if waits {
            assert!(!gpus.execute_on_stream(1, wait(&flag, Comparison::Equal, 6))?);
            assert!(gpus.execute_on_stream(1, wait(&flag, Comparison::AtLeast, 6))?);
        }
        let result = gpus.run(&[launch(&on_flag(READ), 1)]);
        end.write(&1_u64.to_le_bytes());
        running.join().expect("the thread has not panicked")?;
        result.map(drop)
    })
}

#[test]
fn a_stream_that_waits_for_a_word_acquires_its_release() {
    for config in device_configs() {
        for raise in [
            "st.release.sys.global.u32 [%in1], 7;",
            "fence.acq_rel.sys; st.relaxed.sys.global.u32 [%in1], 7;",
            "membar.sys; st.volatile.global.u32 [%in1], 7;",
            "red.release.sys.global.add.u32 [%in1], 7;",
        ] {
            run_after_wait(config.clone(), raise, true).unwrap();
            let fault = expect_fault(run_after_wait(config.clone(), raise, false));
            assert_eq!(fault.kind, FaultKind::Race);
        }
        for raise in [
            "st.relaxed.sys.global.u32 [%in1], 7;",
            "st.global.u32 [%in1], 7;",
            "st.release.gpu.global.u32 [%in1], 7;",
            "fence.acq_rel.gpu; st.relaxed.sys.global.u32 [%in1], 7;",
            "st.release.sys.global.u64 [%in1], 7;",
        ] {
            let fault = expect_fault(run_after_wait(config.clone(), raise, true));
            assert_eq!(fault.kind, FaultKind::Race, "{raise}");
        }
    }
}

/// A kernel of device 0 writes the data. A kernel of device 1 waits for the flag with `wait`, then
/// reads the data.
fn run_before_write(
    config: Config,
    wait: &str,
    raise: impl FnOnce(&Gpus, &Buffer) -> Result<(), Error>,
) -> Result<(), Error> {
    let gpus = &Gpus::new(config);
    let [data, flag, started] = [(); 3].map(|()| gpus.allocate(0, 8));
    let launch = |code: &str, device| {
        let kernel = Kernel::new(&on_flag(code), "k").device(device);
        kernel.arg(&data).arg(&flag).arg(&started)
    };
    let reader = launch(
        &format!(
            "st.relaxed.sys.global.u32 [%in2], 1;
            LOOP: {wait} setp.ne.u32 %p0, %r1, 7; @%p0 bra LOOP;\n{READ}"
        ),
        1,
    );
    thread::scope(|scope| {
        let running = scope.spawn(move || gpus.run(&[reader]));
        wait_for(&started, 1);
        gpus.run(&[launch("st.global.u32 [%in0], 1;", 0)])?;
        raise(gpus, &flag)?;
        running
            .join()
            .expect("the thread has not panicked")
            .map(drop)
    })
}

#[test]
fn a_write_of_a_stream_releases_ended_launches() {
    const ACQUIRE: &str = "ld.acquire.sys.global.u32 %r1, [%in1];";
    let write_by = |device| {
        move |gpus: &Gpus, flag: &Buffer| {
            let address = flag.address();
            gpus.execute_on_stream(device, StreamOperation::Write { address, value: 7 })
                .map(drop)
        }
    };
    for config in device_configs() {
        for wait in [
            ACQUIRE,
            "ld.relaxed.sys.global.u32 %r1, [%in1]; fence.acq_rel.sys;",
            "ld.volatile.global.u32 %r1, [%in1]; membar.sys;",
        ] {
            run_before_write(config.clone(), wait, write_by(0)).unwrap();
        }
        let expect_race = |result| {
            let fault = expect_fault(result);
            assert_eq!(
                (fault.kind, &*fault.site.instruction),
                (FaultKind::Race, READ)
            );
        };
        for wait in [
            "ld.relaxed.sys.global.u32 %r1, [%in1];",
            "ld.acquire.gpu.global.u32 %r1, [%in1];",
            "ld.global.u32 %r1, [%in1];",
        ] {
            expect_race(run_before_write(config.clone(), wait, write_by(0)));
        }
        // The kernel of device 0 is not ordered before the stream of device 1, and the host's write
        // is not that of a stream.
        expect_race(run_before_write(config.clone(), ACQUIRE, write_by(1)));
        expect_race(run_before_write(config, ACQUIRE, |_, flag| {
            flag.write(&7_u64.to_le_bytes());
            Ok(())
        }));
    }
}

/// Events order the launches before their record, and no later ones.
#[test]
fn an_event_orders_launches_of_two_devices() {
    #[derive(Clone, Copy, PartialEq)]
    enum Recorded {
        After,
        Before,
        Never,
        OnAnotherDevice,
    }
    let write = on_flag("st.global.u32 [%in0], 1;");
    for config in device_configs() {
        for recorded in [
            Recorded::After,
            Recorded::Before,
            Recorded::Never,
            Recorded::OnAnotherDevice,
        ] {
            let gpus = Gpus::new(config.clone());
            let data = gpus.allocate(0, 8);
            let launch = |device| {
                let kernel = Kernel::new(&write, "k").device(device);
                gpus.run(&[kernel.arg(&data).arg(&data).arg(&data)])
            };
            let mark = Mark::default();
            let on_stream = |device, operation| {
                assert!(gpus.execute_on_stream(device, operation).unwrap());
            };
            if recorded == Recorded::Before {
                on_stream(0, StreamOperation::Record(mark.clone()));
            }
            launch(0).unwrap();
            match recorded {
                Recorded::After => on_stream(0, StreamOperation::Record(mark.clone())),
                Recorded::OnAnotherDevice => on_stream(2, StreamOperation::Record(mark.clone())),
                Recorded::Before | Recorded::Never => {}
            }
            on_stream(1, StreamOperation::WaitFor(mark));
            match launch(1) {
                Ok(_) => assert!(recorded == Recorded::After),
                result => {
                    assert_eq!(expect_fault(result).kind, FaultKind::Race);
                    assert!(recorded != Recorded::After);
                }
            }
        }
    }
}

/// A thread reads flags that the streams of two devices have raised, then executes one fence.
#[test]
fn a_fence_acquires_the_writes_of_two_streams() {
    let write = kernel(1, "st.global.u32 [%in0], 1; ret;");
    // The reader stores what it has seen plus 1.
    let code = "LOOP: ld.relaxed.sys.global.u32 %r1, [%in1]; add.u32 %r2, %r1, 1;
        st.relaxed.sys.global.u32 [%in0], %r2; setp.ne.u32 %p0, %r1, 2; @%p0 bra LOOP;
        fence.acq_rel.sys; ld.global.u32 %r0, [%in2]; ld.global.u32 %r1, [%in3]; ret;";
    for (config, writes) in device_configs().flat_map(|it| [(it.clone(), true), (it, false)]) {
        let gpus = &Gpus::new(config);
        let [first, second, flag, seen] = [(); 4].map(|()| gpus.allocate(0, 8));
        let reader = Kernel::new(&kernel(4, code), "k").device(2);
        let reader = reader.arg(&seen).arg(&flag).arg(&first).arg(&second);
        let result = thread::scope(|scope| {
            let running = scope.spawn(move || gpus.run(&[reader]));
            wait_for(&seen, 1);
            for (device, data, value) in [(0, &first, 1), (1, &second, 2)] {
                let kernel = Kernel::new(&write, "k").device(device).arg(data);
                gpus.run(&[kernel]).unwrap();
                let address = flag.address();
                if writes || device == 1 {
                    gpus.execute_on_stream(device, StreamOperation::Write { address, value })
                        .unwrap();
                    wait_for(&seen, value + 1);
                }
            }
            running.join().expect("the thread has not panicked")
        });
        match result {
            Ok(_) => assert!(writes),
            result => {
                assert_eq!(expect_fault(result).kind, FaultKind::Race);
                assert!(!writes);
            }
        }
    }
}

/// A flag that a `multimem` instruction raises: the alias proxy is not that of streams.
#[test]
fn a_wait_does_not_acquire_a_write_of_the_alias_proxy() {
    let code = "st.global.u32 [%in0], 1; multimem.red.release.sys.global.add.u32 [%in1], 7; ret;";
    for config in device_configs() {
        let gpus = Gpus::new(config);
        let [data, flag] = [(); 2].map(|()| gpus.allocate(0, 8));
        let object = gpus.multicast(&[&flag]);
        let writer = Kernel::new(&kernel(2, code), "k").device(0);
        gpus.run(&[writer.arg(&data).arg(&object)]).unwrap();
        assert!(
            gpus.execute_on_stream(1, wait(&flag, Comparison::CommonBit, 4))
                .unwrap()
        );
        let reader = Kernel::new(&kernel(1, "ld.global.u32 %r0, [%in0]; ret;"), "k").device(1);
        assert_eq!(
            expect_fault(gpus.run(&[reader.arg(&data)])).kind,
            FaultKind::Race
        );
    }
}

/// After a stream has waited for a flag, kernels may access it without order.
#[test]
fn a_flag_that_a_stream_has_seen_may_be_cleared() {
    let raise = kernel(
        1,
        "fence.acq_rel.sys; st.relaxed.sys.global.u32 [%in0], 7; ret;",
    );
    let clear = kernel(1, "st.global.u32 [%in0], 0; ret;");
    for (config, waits) in device_configs().flat_map(|it| [(it.clone(), true), (it, false)]) {
        let gpus = Gpus::new(config);
        let flag = gpus.allocate(0, 8);
        gpus.run(&[Kernel::new(&raise, "k").arg(&flag)]).unwrap();
        if waits {
            assert!(
                gpus.execute_on_stream(1, wait(&flag, Comparison::Equal, 7))
                    .unwrap()
            );
        }
        match gpus.run(&[Kernel::new(&clear, "k").device(1).arg(&flag)]) {
            Ok(_) => assert!(waits),
            result => {
                assert_eq!(expect_fault(result).kind, FaultKind::Race);
                assert!(!waits);
            }
        }
    }
}

#[test]
fn comparisons_of_words() {
    for (comparison, word, value, is_met) in [
        (Comparison::AtLeast, 5, 5, true),
        (Comparison::AtLeast, 4, 5, false),
        (Comparison::AtLeast, 1, u32::MAX, true),
        (Comparison::AtLeast, u32::MAX, 1, false),
        (Comparison::Equal, 4, 4, true),
        (Comparison::Equal, 5, 4, false),
        (Comparison::CommonBit, 6, 2, true),
        (Comparison::CommonBit, 6, 9, false),
    ] {
        assert_eq!(comparison.is_met(word, value), is_met, "{comparison:?}");
    }
}

#[test]
fn operations_of_streams_check_their_address() {
    for memory in [MemoryModel::Unchecked, MemoryModel::Checked] {
        let gpus = Gpus::new(Config {
            memory,
            ..Config::default()
        });
        let word = gpus.allocate(0, 4);
        let write =
            |address, value| gpus.execute_on_stream(1, StreamOperation::Write { address, value });
        let address = word.address();
        assert!(write(address, 3).unwrap());
        let text = |result: Result<bool, Error>| result.unwrap_err().to_string();
        assert_eq!(
            text(write(address + 2, 4)),
            format!(
                "write of a stream of 4 bytes at {0:#x}: {0:#x} is not a multiple of 4",
                address + 2
            )
        );
        let missing = text(write(address + 4, 4));
        assert!(missing.contains("is accessible to device 1"), "{missing}");
        let missing = text(gpus.execute_on_stream(
            0,
            StreamOperation::Wait {
                address: 4,
                comparison: Comparison::Equal,
                value: 0,
            },
        ));
        let start = "wait of a stream for 4 bytes at 0x4: reads";
        assert!(missing.starts_with(start), "{missing}");
        assert_eq!(word.read_u32(), [3]);
    }
}
