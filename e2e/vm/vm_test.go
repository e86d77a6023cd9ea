package vm

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cavaliergopher/cpio"
	"github.com/google/go-cmp/cmp"

	"github.com/landfall-lb/landfall/release/image"
)

func file(path, content string) image.File {
	return image.File{Path: path, Mode: 0o644, Content: []byte(content)}
}

// debian are files as packages have them.
var debian = []image.File{
	file("boot/vmlinuz-6.1.0-1-amd64", "kernel"), file("boot/config-6.1.0-1-amd64", "config"),
	file("lib/modules/6.1.0-1-amd64/modules.builtin", "names"),
	file("lib/modules/6.1.0-1-amd64/kernel/drivers/net/bonding/bonding.ko", "ELF"),
	file("lib/modules/6.1.0-1-amd64/kernel/drivers/net/dummy.ko", "ELF"),
	file("lib/modules/6.1.0-1-amd64/kernel/drivers/net/usb/asix.ko", "ELF"),
	file("usr/lib/modules/6.1.0-1-amd64/kernel/net/tls/tls.ko.xz", "XZ"), // as in Debian 13
	file("lib/modules/6.1.0-1-amd64/kernel/fs/ext4.ko", "ELF"),
	{Path: "sbin", Mode: fs.ModeSymlink | 0o777, Link: "usr/sbin"},
	file("bin/busybox", "busybox"), file("usr/share/doc/x", "text"),
	{Path: "usr/sbin/iptables", Mode: fs.ModeSymlink | 0o777, Link: "/etc/alternatives/iptables"},
}

func TestWhatTheMachineGets(t *testing.T) {
	chosen, kernel, release, err := system(debian)
	if err != nil || string(kernel) != "kernel" || release != "6.1.0-1-amd64" {
		t.Fatalf("kernel %q of release %q: %v", kernel, release, err)
	}
	var got []string
	for _, f := range chosen {
		if f.Link == "" || f.Path == "usr/sbin/iptables" || f.Path == "usr/bin/sh" || !strings.Contains(f.Path, "/") {
			got = append(got, f.Path)
		}
	}
	slices.Sort(got)
	const modules = "usr/lib/modules/6.1.0-1-amd64/"
	want := []string{"bin", "lib", "lib64", "sbin", "usr/bin/busybox", "usr/bin/sh",
		modules + "kernel/drivers/net/bonding/bonding.ko", modules + "kernel/drivers/net/dummy.ko",
		modules + "kernel/net/tls/tls.ko.xz", modules + "modules.builtin", "usr/sbin/iptables"}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
}

// Since Linux 7 Debian's kernel is beside its modules.
func TestAKernelBesideItsModules(t *testing.T) {
	files := append([]image.File{file("usr/lib/modules/6.1.0-1-amd64/vmlinuz", "kernel")}, debian[1:]...)
	chosen, kernel, release, err := system(files)
	if err != nil || string(kernel) != "kernel" || release != "6.1.0-1-amd64" ||
		slices.ContainsFunc(chosen, func(f image.File) bool { return strings.HasSuffix(f.Path, "/vmlinuz") }) {
		t.Errorf("kernel %q of release %q: %v", kernel, release, err)
	}
}

// The kernel gets the modules of Debian 13 as those of others; the rest stays as it is.
func TestModulesAreUnpacked(t *testing.T) {
	const folder = "usr/lib/modules/6.12.0-1-amd64/kernel/net/tls/"
	cmd := exec.Command("xz", "--compress", "--stdout")
	cmd.Stdin = strings.NewReader("ELF")
	packed, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	got, err := unpackModules(t.Context(), []image.File{
		file(folder+"tls.ko.xz", string(packed)), file(folder+"old.ko", "ELF"), file("usr/lib/other.ko.xz", "XZ")})
	if err != nil {
		t.Fatal(err)
	}
	want := []image.File{file(folder+"tls.ko", "ELF"), file(folder+"old.ko", "ELF"), file("usr/lib/other.ko.xz", "XZ")}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	_, err = unpackModules(t.Context(), []image.File{file(folder+"tls.ko.xz", "XZ")})
	if err == nil || !strings.Contains(err.Error(), folder+"tls.ko.xz") {
		t.Errorf("error %v of a module that does not unpack", err)
	}
}

func TestPackagesThatHaveNoKernelOrTwo(t *testing.T) {
	for want, files := range map[string][]image.File{
		"no kernel":   debian[1:],
		"two kernels": append([]image.File{file("boot/vmlinuz-5.10.0-1-amd64", "kernel")}, debian...),
	} {
		if _, _, _, err := system(files); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want one with %q", err, want)
		}
	}
}

// The archive holds every file once, after its folder, with its type, permissions and content.
func TestInitramfs(t *testing.T) {
	chosen, _, _, err := system(debian)
	if err != nil {
		t.Fatal(err)
	}
	plan := []Program{{Name: "a", Argv: []string{"/landfall/a.test"}, Timeout: time.Minute}}
	var archive, again bytes.Buffer
	for _, w := range []io.Writer{&archive, &again} {
		if err := writeInitramfs(w, chosen, []byte("program"), plan); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(archive.Bytes(), again.Bytes()) {
		t.Error("the same files give another archive")
	}
	got, folders := map[string]string{}, map[string]bool{".": true}
	for r := cpio.NewReader(&archive); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		content, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		dir := "."
		if i := strings.LastIndex(h.Name, "/"); i >= 0 {
			dir = h.Name[:i]
		}
		if !folders[dir] {
			t.Errorf("%s comes before its folder", h.Name)
		}
		if h.Mode.IsDir() {
			folders[h.Name] = true
			continue
		}
		if _, twice := got[h.Name]; twice {
			t.Errorf("%s is there twice", h.Name)
		}
		got[h.Name] = h.FileInfo().Mode().String() + " " + h.Linkname + string(content)
	}
	text, err := json.Marshal(plan)
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{
		"init": "-rwxr-xr-x program", "etc/landfall-vm.json": "-rw-r--r-- " + string(text), "usr/bin/busybox": "-rw-r--r-- busybox",
		"usr/bin/sh": "Lrwxrwxrwx busybox", "bin": "Lrwxrwxrwx usr/bin", "usr/sbin/iptables": "Lrwxrwxrwx /etc/alternatives/iptables",
	} {
		if got[name] != want {
			t.Errorf("%s is %q, want %q", name, got[name], want)
		}
	}
	if err := writeInitramfs(io.Discard, []image.File{{Path: "dev/null", Mode: fs.ModeDevice}}, nil, nil); err == nil {
		t.Error("a device was taken for a file")
	}
}

func TestReportsAreCollected(t *testing.T) {
	plan := []Program{{Name: "a"}, {Name: "b"}, {Name: "c"}}
	var sent bytes.Buffer
	r := reporter{to: json.NewEncoder(&sent)}
	r.say(report{Kernel: "6.1.0-1-amd64"})
	for _, text := range []string{"--- PA", "SS: TestA\nand", " more\n"} {
		if _, err := (output{&r, "a"}).Write([]byte(text)); err != nil {
			t.Fatal(err)
		}
	}
	r.say(report{Program: "a", Ended: true, Elapsed: time.Second})
	r.say(report{Program: "b", Output: "panic\n"})
	r.say(report{Program: "b", Ended: true, Error: "exit status 2", Elapsed: time.Minute})
	r.say(report{Program: "c", Output: "half"})
	var heard []string
	started := 0
	results, err := collect(bytes.NewReader(sent.Bytes()), plan, func() { started++ },
		func(program, line string) { heard = append(heard, program+": "+line) })
	if err != nil || started != 1 || results.Kernel != "6.1.0-1-amd64" {
		t.Errorf("kernel %q, started %d times: %v", results.Kernel, started, err)
	}
	if d := cmp.Diff([]string{"a: --- PASS: TestA", "a: and more", "b: panic"}, heard); d != "" {
		t.Error(d)
	}
	type ended struct{ Program, Output, Err, Elapsed string }
	var got []ended
	for _, p := range results.Programs {
		e := ended{Program: p.Program, Output: p.Output, Elapsed: p.Elapsed.String()}
		if p.Err != nil {
			e.Err = p.Err.Error()
		}
		got = append(got, e)
	}
	if d := cmp.Diff([]ended{{"a", "--- PASS: TestA\nand more\n", "", "1s"}, {"b", "panic\n", "exit status 2", "1m0s"},
		{"c", "half", errUnfinished.Error(), "0s"}}, got); d != "" {
		t.Error(d)
	}
	for _, bad := range []string{"no JSON\n", `{"Program":"d","Output":"x"}` + "\n"} {
		if _, err := collect(strings.NewReader(bad), plan, func() {}, func(string, string) {}); err == nil {
			t.Errorf("%q was taken for a report", bad)
		}
	}
}

func TestKVMNeedsAProcessorThatCan(t *testing.T) {
	for text, want := range map[string]bool{
		"processor\t: 0\nflags\t\t: fpu vmx sse\nbugs\t: x\n": true, "flags\t\t: fpu svm\n": true,
		"flags\t\t: fpu sse\nvmx flags\t: vnmi\n": false, "": false, "model name: vmx\n": false,
	} {
		if got := virtualizes(text); got != want {
			t.Errorf("%q: %v, want %v", text, got, want)
		}
	}
}

// A machine has neither a disk nor a network card, and none of the user's own configuration.
func TestArguments(t *testing.T) {
	m := Machine{CPUs: 2, Memory: 3072, Accelerator: TCG}
	argv := strings.Join(m.arguments(files{"vmlinuz", "initramfs", "console"}), " ")
	for _, want := range []string{"-nodefaults", "-no-user-config", "-nic none", "-no-reboot", "-m 3072", "-smp 2",
		"-accel tcg,thread=single", "-kernel vmlinuz", "-initrd initramfs", "panic=-1",
		"-serial file:console -serial stdio"} { // the kernel has the first
		if !strings.Contains(argv, want) {
			t.Errorf("%s has no %s", argv, want)
		}
	}
	// With KVM, the clock is that of others.
	for accelerator, want := range map[string]bool{TCG: true, KVM: false} {
		m.Accelerator = accelerator
		argv := m.arguments(files{"vmlinuz", "initramfs", "console"})
		if counts := slices.Contains(argv, "-icount"); counts != want || slices.Contains(argv, "clock=vm") != want {
			t.Errorf("%s: instructions are counted: %v, want %v", accelerator, counts, want)
		}
	}
}
