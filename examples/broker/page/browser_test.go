package page

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"image"
	"image/color"
	"image/draw"
	"image/png"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"

	"github.com/idempotence-go/idempotence/examples/broker/server"
)

var screenshots = flag.String("screenshots", "", "`directory` to write screenshots of the page to")

// A browser is a headless Chromium with the page open.
type browser struct {
	t      *testing.T
	ctx    context.Context
	opened bool
}

// open starts a browser. Any script error on the page fails the test.
func open(t *testing.T, r *rig) *browser {
	t.Helper()
	needChromium(t)
	options := []chromedp.ExecAllocatorOption{
		chromedp.ExecPath(chromium()),
		chromedp.UserDataDir(t.TempDir()),
		chromedp.Headless, chromedp.NoSandbox, chromedp.DisableGPU, chromedp.NoFirstRun,
		chromedp.Flag("disable-quic", true),
		chromedp.Flag("disable-background-networking", true),
		chromedp.Flag("disable-component-update", true),
		chromedp.Flag("disable-sync", true),
		chromedp.Flag("hide-scrollbars", true),
	}
	allocator, cancelAllocator := chromedp.NewExecAllocator(context.Background(), options...)
	ctx, cancel := chromedp.NewContext(allocator)
	exceptions := chromedp.Events(ctx, runtime.ExceptionThrown)
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		for e, err := range exceptions {
			if err != nil {
				return
			}
			t.Errorf("script error: %+v", e.ExceptionDetails)
		}
	}()
	t.Cleanup(func() {
		cancel()
		cancelAllocator()
		<-watched
	})
	b := &browser{t: t, ctx: ctx}
	b.do(chromedp.Navigate(r.url))
	return b
}

func chromium() string {
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome"} {
		if path, err := exec.LookPath(name); err == nil {
			return path
		}
	}
	return ""
}

// needChromium fails the test if there is no Chromium. A test that were skipped
// would not be seen.
func needChromium(t *testing.T) {
	t.Helper()
	if chromium() != "" {
		return
	}
	const install = "chromium is not installed; install it with: apt-get install chromium (or brew install chromium)"
	if testing.Short() {
		t.Skip(install)
	}
	t.Fatal(install + ", or leave it out with: go test -short")
}

// do does what a reader does.
func (b *browser) do(steps ...chromedp.Action[chromedp.Void]) {
	b.t.Helper()
	ctx, cancel := b.ctx, func() {}
	if b.opened { // until then, the context is that of the browser itself
		ctx, cancel = context.WithTimeout(ctx, patience)
	}
	defer cancel()
	b.opened = true
	if err := chromedp.Do(ctx, steps...); err != nil {
		b.t.Fatal(err)
	}
}

// evaluate returns the value of an expression on the page.
func evaluate[T any](b *browser, expression string) T {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, patience)
	defer cancel()
	value, err := chromedp.Run(ctx, chromedp.Evaluate[T](expression))
	if err != nil {
		b.t.Fatal(err)
	}
	return value
}

func (b *browser) click(selector string) {
	b.t.Helper()
	b.do(chromedp.Click(chromedp.CSS(selector)))
}

// view sets the size of the window and the colours that the reader prefers.
func (b *browser) view(width, height int64, scheme string) {
	b.t.Helper()
	b.do(chromedp.EmulateViewport(width, height), chromedp.Func(func(ctx context.Context, target *chromedp.Target) error {
		_, err := cdp.Call(ctx, target, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{
			Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: scheme}},
		})
		return err
	}))
}

// goTo changes what is shown, as a link would.
func (b *browser) goTo(hash string) {
	b.t.Helper()
	evaluate[string](b, fmt.Sprintf("location.hash = %q", hash))
}

// text returns what a reader sees of an element, in one line.
func (b *browser) text(selector string) string {
	b.t.Helper()
	text := evaluate[string](b, fmt.Sprintf("document.querySelector(%q)?.innerText ?? ''", selector))
	return strings.Join(strings.Fields(text), " ")
}

// want waits until the element shows all of the texts.
func (b *browser) want(selector string, texts ...string) {
	b.t.Helper()
	var got string
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		got = b.text(selector)
		missing := false
		for _, text := range texts {
			missing = missing || !strings.Contains(got, text)
		}
		if !missing {
			return
		}
	}
	b.t.Fatalf("%s shows\n\t%s\nwant in it\n\t%q", selector, got, texts)
}

// step clicks a button of the lesson and waits until its step is shown.
func (b *browser) step(selector string, number int) {
	b.t.Helper()
	b.click(selector)
	b.want("#transcript", fmt.Sprintf("step %d", number))
}

// screenshot writes a picture of the whole page.
func (b *browser) screenshot(name string) {
	b.t.Helper()
	b.write(name, chromedp.FullScreenshot(100))
}

// screenshotOf writes a picture of one element.
func (b *browser) screenshotOf(selector, name string) {
	b.t.Helper()
	b.write(name, chromedp.Screenshot(chromedp.CSS(selector)))
}

func (b *browser) write(name string, take chromedp.Action[[]byte]) {
	b.t.Helper()
	if *screenshots == "" {
		return
	}
	b.do(chromedp.Sleep(500 * time.Millisecond)) // until the colours have changed
	picture, err := chromedp.Run(b.ctx, take)
	if err == nil {
		picture, err = reduce(picture)
	}
	if err == nil {
		err = os.WriteFile(filepath.Join(*screenshots, name+".png"), picture, 0o644)
	}
	if err != nil {
		b.t.Fatal(err)
	}
}

// reduce makes a picture smaller by keeping its 64 most frequent colours.
func reduce(picture []byte) ([]byte, error) {
	full, err := png.Decode(bytes.NewReader(picture))
	if err != nil {
		return nil, err
	}
	counts := make(map[color.Color]int)
	for y := range full.Bounds().Dy() {
		for x := range full.Bounds().Dx() {
			counts[full.At(x, y)]++
		}
	}
	colors := slices.SortedFunc(maps.Keys(counts), func(a, b color.Color) int { return counts[b] - counts[a] })
	small := image.NewPaletted(full.Bounds(), colors[:min(len(colors), 64)])
	draw.Draw(small, full.Bounds(), full, image.Point{}, draw.Src)
	var out bytes.Buffer
	err = (&png.Encoder{CompressionLevel: png.BestCompression}).Encode(&out, small)
	return out.Bytes(), err
}

func TestLessonInABrowser(t *testing.T) {
	t.Parallel()
	b := open(t, start(t, server.Config{}))
	b.view(1100, 900, "light")
	b.click("#to-lesson")
	b.want("#shown", "Nothing was sent yet")

	// The worked trace.
	for i, want := range [][]string{
		{"Append", "3 records appended at offset 0", "Rule 2", "End offset: 0, then 3"},
		{"Append", "2 records appended at offset 3", "Rule 6", "Sequences 3 to 4 at offset 3 enter the window"},
		{"Duplicate", "already in the log at offset 3", "Rule 5", "Changed Nothing."},
		{"Out of order", "Sequence 7 came; 5 was expected. 2 records are missing", "Code 45, OUT_OF_ORDER_SEQUENCE_NUMBER", "Rule 7", "Changed Nothing."},
		{"Out of order", "Sequence 7 came; 0 was expected. A new epoch starts at 0", "Rule 4", "Changed Nothing."},
		{"Append", "1 record appended at offset 5", "Rule 4", "Epoch: 0, then 1"},
		{"Fenced", "Epoch 0 came; the current epoch is 1", "Code 47, INVALID_PRODUCER_EPOCH", "Rule 3", "Changed Nothing."},
	} {
		b.step("#trace", i+1)
		b.want("#shown", want...)
	}
	b.want("#lesson-state", "1 0 5 newest", "2 empty", "end offset 6", "next 1")
	b.want("#trace", "All were sent")
	b.screenshot("lesson-light")
	b.view(1100, 900, "dark")
	b.screenshot("lesson-dark")
	b.view(390, 800, "dark")
	b.wantFits()
	b.screenshot("lesson-phone")
	b.view(1100, 900, "light")

	// What the reader chooses.
	b.click("#over")
	b.want("#shown", "Nothing was sent yet")
	step := 0
	choose := func(button string, want ...string) {
		t.Helper()
		step++
		b.step("[data-step="+button+"]", step)
		b.want("#shown", want...)
	}
	choose("next", "Append", "Rule 2")
	choose("same", "Duplicate", "offset 0")
	choose("cut", "Append", "its producer does not hear of it")
	choose("same", "Duplicate", "offset 2")
	choose("gap", "Out of order", "2 records are missing")
	choose("new-epoch", "Append", "Epoch: 0, then 1")
	choose("old-epoch", "Fenced", "the current epoch is 1")
	choose("wrap", "sequences 2147483646 to 1", "ends at sequence 1", "Rule 6")
	b.want("#lesson-state", "2147483641 to 2147483645", "2147483646 to 1", "next 2")
	choose("same", "Duplicate")
	before := b.text("#lesson-state")
	choose("restart", "The broker restarts", "snapshot of", "Changed Nothing.")
	if after := b.text("#lesson-state"); after != before {
		t.Errorf("after the restart the broker remembers\n\t%s\nbefore\n\t%s", after, before)
	}
	choose("same", "Duplicate")
	choose("hold", "Append begun", "no answer yet", "In flight: 0, then 1")
	choose("same", "In flight", "still being appended", "Code 7, REQUEST_TIMED_OUT")
	choose("finish", "The append ends", "In flight: 1, then 0")
	choose("same", "Duplicate")
	choose("expire", "it is forgotten", "The producer is unknown")
	choose("next", "Unknown producer", "Code 59, UNKNOWN_PRODUCER_ID", "Rule 2")

	// The picture in the README.
	b.goTo("#lesson/0.0.3,0.3.2,next,next,next,next,same")
	b.want("#shown", "Duplicate", "already in the log at offset 11")
	for _, scheme := range []string{"light", "dark"} {
		b.view(1100, 900, scheme)
		b.screenshotOf("#lesson .columns", "page-"+scheme)
	}
	b.do(chromedp.NavigateBack())
	b.want("#shown", "Unknown producer")

	// Back undoes a step, and the address holds the lesson.
	b.do(chromedp.NavigateBack())
	b.want("#shown", "it is forgotten")
	b.do(chromedp.Reload())
	b.want("#shown", "it is forgotten")
	b.want("#transcript", "step 1", fmt.Sprintf("step %d", step-1))
	b.goTo("#lesson/next,dance")
	b.want("#shown", `no step "dance"`)
}

// The lesson can be played with the keyboard alone.
func TestLessonByKeyboard(t *testing.T) {
	t.Parallel()
	b := open(t, start(t, server.Config{}))
	b.goTo("#lesson")
	b.want("#shown", "Nothing was sent yet")
	focus := func() string {
		return evaluate[string](b, "document.activeElement.id || document.activeElement.dataset.step || ''")
	}
	for range 20 {
		if focus() == "trace" {
			break
		}
		b.do(chromedp.KeyEvent(kb.Tab))
	}
	b.do(chromedp.KeyEvent(kb.Enter))
	b.want("#shown", "3 records appended at offset 0")
	for range 20 {
		if focus() == "same" {
			break
		}
		b.do(chromedp.KeyEvent(kb.Tab))
	}
	b.do(chromedp.KeyEvent(kb.Enter))
	b.want("#shown", "Duplicate", "already in the log at offset 0")
	if f := focus(); f != "same" {
		t.Errorf("the focus went to %q", f)
	}
}

// wantFits fails the test if the page is wider than the window.
func (b *browser) wantFits() {
	b.t.Helper()
	if over := evaluate[int](b, "document.documentElement.scrollWidth - document.documentElement.clientWidth"); over > 0 {
		b.t.Errorf("the page is %d pixels wider than the window", over)
	}
}

func TestBrokerInABrowser(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	r := start(t, server.Config{Partitions: 2, Dir: dir})
	b := open(t, r)
	b.view(1100, 900, "light")
	b.want("#live", "There are no topics yet", "live")

	// A topic appears, and its numbers move.
	raw := dial(t, r)
	raw.produce(0, 0, 0, 3)
	b.want("#partitions", "orders-0", "orders-1")
	b.click("#partitions a")
	b.want("#partition", "Partition orders-0")
	b.want("#producers", "0")
	b.want("#answers", "producer 0, epoch 0, sequences 0 to 2", "3 records appended at offset 0")
	b.click("#producers a")
	b.want("#producer", "Producer 0", "1 0 to 2 0 newest", "next 3")

	// The window fills and turns.
	for i := range int32(5) {
		raw.produce(0, 0, 3+2*i, 2)
		b.want("#producer-state", fmt.Sprintf("next %d", 5+2*i))
	}
	b.want("#producer-state", "1 11 to 12 11 newest", "2 3 to 4 3 leaves next", "next 13")
	raw.produce(0, 0, 11, 2)
	b.want("#answers", "Duplicate", "already in the log at offset 11")
	raw.produce(0, 0, 15, 1)
	b.want("#answers", "Out of order", "Sequence 15 came; 13 was expected. 2 records are missing. Answered with 45 OUT_OF_ORDER_SEQUENCE_NUMBER")
	b.want("#partitions tr[aria-current]", "13 13 0 1 0 6 1 1")
	b.screenshot("broker-light")
	b.view(1100, 900, "dark")
	b.screenshot("broker-dark")
	b.view(390, 800, "light")
	b.wantFits()
	b.screenshot("broker-phone")
	raw.produce(0, 1, 0, 1)
	raw.produce(0, 0, 13, 1)
	b.want("#answers", "Fenced", "Epoch 0 came; the current epoch is 1")
	b.want("#producer-state", "next 1", "2 empty")

	// A restart of the broker: the page finds the new one by itself.
	r.stop()
	r.broker(server.Config{Partitions: 2, Dir: dir})
	raw = dial(t, r)
	raw.produce(0, 1, 0, 1)
	b.want("#answers", "Duplicate", "already in the log at offset 13")
	b.want("#producer-state", "next 1")

	// A producer that is not known.
	b.do(chromedp.SendKeys(chromedp.CSS("#find-id"), "9223372036854775807"+kb.Enter))
	b.want("#producer", "Producer 9223372036854775807", "This partition remembers nothing of it")
	b.goTo("#live/nothing/3")
	b.want("#partition", "There is no such partition")
}
