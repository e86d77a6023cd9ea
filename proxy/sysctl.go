package main

import (
	"cmp"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
)

// What kube-proxy makes of conntrack's limits: room for every connection of a node, and no flow kept for days after its ends are gone.
const (
	conntrackFolder   = "/proc/sys/net/netfilter"
	conntrackPerCore  = 32 * 1024
	conntrackMost     = 1 << 20
	conntrackLeast    = 128 * 1024
	establishedLimit  = 24 * 60 * 60 // seconds
	closeWaitLimit    = 60 * 60      // seconds
	parameterMax      = "nf_conntrack_max"
	parameterTimeout  = "nf_conntrack_tcp_timeout_established"
	parameterWait     = "nf_conntrack_tcp_timeout_close_wait"
	parameterLiberal  = "nf_conntrack_tcp_be_liberal"
	conntrackHashFile = "/sys/module/nf_conntrack/parameters/hashsize"
)

// setConntrack writes conntrack's parameters. What cannot be written stays as it is, and the log says so: a container may see
// them read-only, and the node's administrator has set them.
func setConntrack(folder, hashFile string, cores int, liberal bool, log *slog.Logger) {
	most := max(min(conntrackPerCore*cores, conntrackMost), conntrackLeast)
	raise := func(now int) bool { return now < most }
	limit := func(seconds int) func(int) bool { return func(now int) bool { return now > seconds } }
	set := func(file string, value int, wrong func(now int) bool) bool {
		err := write(file, value, wrong)
		if err != nil {
			log.Info("a kernel parameter stays as it is", "wanted", value, "reason", err)
		}
		return err == nil
	}
	// The table is the whole machine's, so whoever may not set the limit keeps away from it too.
	if set(filepath.Join(folder, parameterMax), most, raise) {
		set(hashFile, most/4, func(now int) bool { return now < most/4 })
	}
	set(filepath.Join(folder, parameterTimeout), establishedLimit, limit(establishedLimit))
	set(filepath.Join(folder, parameterWait), closeWaitLimit, func(now int) bool { return now != closeWaitLimit })
	if liberal {
		set(filepath.Join(folder, parameterLiberal), 1, func(now int) bool { return now != 1 })
	}
}

// write sets a parameter that is wrong now.
func write(file string, value int, wrong func(now int) bool) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	now, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	if !wrong(now) {
		return nil
	}
	return os.WriteFile(file, []byte(strconv.Itoa(value)+"\n"), 0o644)
}

func cores() int { return cmp.Or(runtime.NumCPU(), 1) }
