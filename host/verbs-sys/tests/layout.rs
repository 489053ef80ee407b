//! Compares the layout of the generated structures with that of the installed header
//! `infiniband/verbs.h`, as the C compiler sees it.

use core::mem::offset_of;
use std::env;
use std::fs;
use std::path::Path;
use std::process::Command;

use fusewire_verbs_sys::bindings::*;

const HEADER: &str = "/usr/include/infiniband/verbs.h";

/// Creates lines of a C program and the lines that it must print: the offsets of the fields. Not
/// the sizes, because newer versions of the header append fields to structures.
macro_rules! layouts {
    ($($name:ident { $($field:ident),* })*) => {{
        let mut source = String::new();
        let mut expected = String::new();
        $(
            let name = stringify!($name);
            $(
                let field = stringify!($field);
                source += &format!(
                    "printf(\"{name}.{field} %zu\\n\", offsetof(struct {name}, {field}));\n"
                );
                expected += &format!("{name}.{field} {}\n", offset_of!($name, $field));
            )*
        )*
        (source, expected)
    }};
}

#[test]
fn the_structures_have_the_layout_of_the_header() {
    let required = env::var("FUSEWIRE_REQUIRE").unwrap_or_default();
    if !Path::new(HEADER).exists() {
        assert!(
            !required.split(',').any(|name| name == "cc"),
            "{HEADER} is missing"
        );
        eprintln!("skipped: {HEADER} is missing; install libibverbs-dev");
        return;
    }
    let (source, mut expected) = layouts! {
        ibv_device_attr { max_qp_wr, max_qp_rd_atom, max_qp_init_rd_atom, phys_port_cnt }
        ibv_port_attr {
            state, active_mtu, gid_tbl_len, lid, active_width, active_speed, link_layer
        }
        ibv_gid_entry { gid, gid_index, port_num, gid_type, ndev_ifindex }
        ibv_context { device, ops, cmd_fd, async_fd, mutex, abi_compat }
        ibv_context_ops { poll_cq, req_notify_cq, post_send, post_recv }
        ibv_comp_channel { context, fd, refcnt }
        ibv_cq { context, channel, cq_context, mutex, cond }
        ibv_mr { addr, length, lkey, rkey }
        ibv_qp { context, qp_num, state, qp_type, mutex, events_completed }
        ibv_qp_init_attr { send_cq, recv_cq, cap, qp_type, sq_sig_all }
        ibv_qp_cap { max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data }
        ibv_qp_attr {
            qp_state, path_mtu, rq_psn, sq_psn, dest_qp_num, qp_access_flags, ah_attr, pkey_index,
            max_rd_atomic, max_dest_rd_atomic, min_rnr_timer, port_num, timeout, retry_cnt,
            rnr_retry, rate_limit
        }
        ibv_ah_attr { grh, dlid, sl, is_global, port_num }
        ibv_global_route { dgid, flow_label, sgid_index, hop_limit, traffic_class }
        ibv_sge { addr, length, lkey }
        ibv_send_wr { wr_id, next, sg_list, num_sge, opcode, send_flags, wr, qp_type }
        ibv_recv_wr { wr_id, next, sg_list, num_sge }
        ibv_wc { wr_id, status, opcode, vendor_err, byte_len, qp_num, wc_flags }
    };
    let constants = [
        // Structures of which there are arrays.
        ("sizeof(struct ibv_sge)", size_of::<ibv_sge>() as i64),
        ("sizeof(struct ibv_wc)", size_of::<ibv_wc>() as i64),
        ("IBV_WC_RETRY_EXC_ERR", IBV_WC_RETRY_EXC_ERR as i64),
        (
            "IBV_WC_RECV_RDMA_WITH_IMM",
            IBV_WC_RECV_RDMA_WITH_IMM as i64,
        ),
        (
            "IBV_WR_RDMA_WRITE_WITH_IMM",
            IBV_WR_RDMA_WRITE_WITH_IMM as i64,
        ),
        (
            "IBV_QP_MAX_DEST_RD_ATOMIC",
            IBV_QP_MAX_DEST_RD_ATOMIC as i64,
        ),
        ("IBV_SEND_INLINE", IBV_SEND_INLINE as i64),
        ("IBV_ACCESS_REMOTE_READ", IBV_ACCESS_REMOTE_READ as i64),
        ("IBV_QPS_RTS", IBV_QPS_RTS as i64),
        ("IBV_GID_TYPE_ROCE_V2", IBV_GID_TYPE_ROCE_V2 as i64),
    ];
    let mut lines = source;
    for (name, value) in constants {
        lines += &format!("printf(\"{name} %ld\\n\", (long){name});\n");
        expected += &format!("{name} {value}\n");
    }
    // The negative control: the comparison must notice a wrong offset.
    assert_ne!(
        run(&lines.replacen("offsetof(struct ibv_wc, opcode)", "99", 1)),
        expected
    );
    assert_eq!(run(&lines), expected);
}

/// Compiles and runs a C program with these lines. Returns its output.
fn run(lines: &str) -> String {
    let folder = env::temp_dir().join(format!("fusewire-verbs-layout-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let (source, program) = (folder.join("layout.c"), folder.join("layout"));
    let text = format!(
        "#include <infiniband/verbs.h>\n#include <stddef.h>\n#include <stdio.h>\n\
         int main(void) {{\n{lines}return 0;\n}}\n"
    );
    fs::write(&source, text).unwrap();
    let status = Command::new("cc")
        .arg(&source)
        .arg("-o")
        .arg(&program)
        .status();
    assert!(status.unwrap().success());
    let output = Command::new(&program).output().unwrap();
    fs::remove_dir_all(&folder).unwrap();
    String::from_utf8(output.stdout).unwrap()
}
